"""`LocalEngine`: samples for coroutines with a model of this process, those that wait together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self, TypeAlias, TypeVar

import torch
from torch import nn

from redrb.algorithms import generate
from redrb.recipe.prompts import padded
from redrb.train.engines.completions import Finish, Generation


@dataclass(frozen=True, slots=True)
class Turn:
    """One completion that is asked for; tokens of `stop` end it, beside EOS."""

    tokens: Sequence[int]
    max_new_tokens: int
    stop: tuple[int, ...] = ()


def sampled_turns(
    actor: nn.Module, turns: Sequence[Turn], options: Mapping[str, Any]
) -> list[Generation]:
    """Sample turns, in one batch for each length limit and set of stop tokens.

    After `SamplingEnded` a completion that is not complete ends with "abort".
    """
    alike: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for number, turn in enumerate(turns):
        alike.setdefault((turn.max_new_tokens, turn.stop), []).append(number)
    found: dict[int, Generation] = {}
    for (most, stop), numbers in alike.items():
        batch = [turns[number].tokens for number in numbers]
        found.update(zip(numbers, _sampled(actor, batch, most, stop, options), strict=True))
    return [found[number] for number in range(len(turns))]


def _sampled(
    actor: nn.Module,
    batch: Sequence[Sequence[int]],
    most: int,
    stop: tuple[int, ...],
    options: Mapping[str, Any],
) -> list[Generation]:
    eos = options["eos_token_id"]
    ends = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    prompts = padded(
        [torch.as_tensor(tokens, dtype=torch.int64) for tokens in batch], options["pad_token_id"]
    )
    limits = {"max_new_tokens": most, "eos_token_id": [*ends, *stop] or None}
    done = generate(actor, prompts, **{**options, **limits}).rows(range(len(batch)), device="cpu")
    versions = done.token_versions
    if versions is None:
        versions = torch.full_like(done.action_mask, -1, dtype=torch.int64)
    generations = []
    for row, mask in enumerate(done.action_mask):
        tokens = done.completion(row).tolist()
        log_probs, known = (each[row][mask].tolist() for each in (done.action_log_probs, versions))
        finish: Finish = "length" if len(tokens) == most else "abort"
        if done.finished is not None and done.finished[row]:
            finish = "stop"
        generations.append(Generation(tokens, log_probs, known, finish))
    return generations


R = TypeVar("R")

_Request: TypeAlias = tuple[Turn, asyncio.Future[Generation]]


class LocalEngine:
    """The engine of episodes in a recipe: `await engine.generate(...)` as that of a server.

    The model samples in one thread, so that the event loop goes on. All requests that wait when the
    model is free are one batch.

    Attributes:
        ended: Whether sampling is to end with what there is.
        batches: Batches that were sampled.
    """

    def __init__(
        self, sample: Callable[[Sequence[Turn]], list[Generation]], *, max_new_tokens: int
    ) -> None:
        self._sample, self._most = sample, max_new_tokens
        self._waiting: list[_Request] = []
        self.sampling = self.ended = False
        self.batches = 0
        accelerator: Any = torch.accelerator
        begin: tuple[Any, ...] = ()
        if accelerator.is_available():  # a new thread begins with the first device
            begin = (accelerator.set_device_index, (accelerator.current_device_index(),))
        self._thread = ThreadPoolExecutor(1, "redrb-sampling", *begin)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.abort()
        await asyncio.to_thread(self._thread.shutdown)

    async def generate(
        self,
        tokens: Sequence[int],
        *,
        max_new_tokens: int | None = None,
        stop_token_ids: Sequence[int] = (),
        routed_tokens: int = 0,  # noqa: ARG002
    ) -> Generation:
        """Sample one completion, at the temperature of the recipe.

        Args:
            max_new_tokens: Most tokens; None: the recipe's `max_new_tokens`.
            routed_tokens: For a server, as of `Engine.generate`; here no experts are told.

        Returns:
            The completion; `finish` is "abort" if the maker ends.
        """
        if self.ended:
            return Generation()
        loop = asyncio.get_running_loop()
        most = self._most if max_new_tokens is None else max_new_tokens
        result: asyncio.Future[Generation] = loop.create_future()
        self._waiting.append((Turn(tokens, most, tuple(stop_token_ids)), result))
        if len(self._waiting) == 1 and not self.sampling:
            loop.call_soon(self._begin)  # after all coroutines that are ready now
        return await result

    async def call(self, function: Callable[[], R]) -> R:
        """Call a function in the engine's thread, between two batches."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    async def abort(self) -> None:
        """End all requests, also later ones, with what was sampled so far."""
        self.ended = True
        waiting, self._waiting = self._waiting, []
        for _, result in waiting:
            if not result.done():
                result.set_result(Generation())

    def _begin(self) -> None:
        batch = [(turn, result) for turn, result in self._waiting if not result.done()]
        self._waiting, self.sampling = [], bool(batch)
        if not batch:
            return
        turns = [turn for turn, _ in batch]
        done = asyncio.get_running_loop().run_in_executor(self._thread, self._sample, turns)
        done.add_done_callback(lambda future: self._answer(batch, future))

    def _answer(self, batch: list[_Request], done: asyncio.Future[list[Generation]]) -> None:
        """Answer all at once, so that the episodes' next requests are again one batch."""
        self.batches += 1
        error = done.exception()
        for number, (_, result) in enumerate(batch):
            if result.done():  # its episode was given up
                continue
            if error is None:
                result.set_result(done.result()[number])
            else:
                result.set_exception(error)
        asyncio.get_running_loop().call_soon(self._begin)  # after the episodes that go on now
