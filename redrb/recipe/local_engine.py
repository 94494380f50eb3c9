"""`LocalEngine`: samples for coroutines with a model of this process, those that wait together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch
from torch import nn

from redrb.algorithms import generate
from redrb.algorithms.event_loop import submit
from redrb.engines import Generation
from redrb.errors import ConfigError
from redrb.recipe.sampling import padded

R = TypeVar("R")

GRACE_S = 10.0
"""How long a request of an episode may be late, because its event loop is busy."""


@dataclass(frozen=True, eq=False)
class _Request:
    """One call of `generate`."""

    tokens: Sequence[int]
    max_new_tokens: int
    stop: tuple[int, ...]
    result: asyncio.Future[Generation]

    def answer(self, generation: Generation) -> None:
        if not self.result.done():  # its episode may have been given up
            self.result.set_result(generation)


class LocalEngine:
    """The engine of episodes in a recipe: `await engine.generate(...)` as that of a server.

    Coroutines run in the event loop of a thread, and `serve` samples in the thread that calls it.
    Requests that are made at the same time are one batch.
    """

    def __init__(
        self,
        actor: nn.Module,
        options: Mapping[str, Any],
        *,
        version: Callable[[], int | None],
        timeout: float,
    ) -> None:
        """Make an engine for one call of `serve`.

        Args:
            actor: The policy, in eval mode.
            options: Options of `redrb.algorithms.generate`, its length limit among them.
            version: Returns the version of the actor's weights; None: not known. With the option
                `before_token` that function tells it.
            timeout: Seconds within which the coroutines must ask for something, or end.
        """
        self._actor, self._options = actor, dict(options)
        self._options.setdefault("before_token", version)
        self._timeout = timeout
        self._waiting: list[_Request] = []
        self._asked: SimpleQueue[list[_Request] | None] = SimpleQueue()

    async def generate(
        self,
        tokens: Sequence[int],
        *,
        max_new_tokens: int | None = None,
        stop_token_ids: Sequence[int] = (),
    ) -> Generation:
        """Sample one completion, at the temperature of the recipe.

        Args:
            tokens: The prompt, with everything that was sampled or given before.
            max_new_tokens: Most tokens; None: the recipe's `max_new_tokens`.
            stop_token_ids: Tokens that end the completion, beside EOS.
        """
        loop = asyncio.get_running_loop()
        most = self._options["max_new_tokens"] if max_new_tokens is None else max_new_tokens
        request = _Request(tokens, most, tuple(stop_token_ids), loop.create_future())
        self._waiting.append(request)
        if len(self._waiting) == 1:
            loop.call_soon(self._ask)  # after all coroutines that are ready now
        return await request.result

    def serve(self, work: Coroutine[Any, Any, R]) -> R:
        """Run a coroutine in the event loop, sample what is asked for, and return its result.

        Raises:
            ConfigError: It neither asked for anything nor ended in time.
            Any error of the coroutine or of sampling.
        """
        future: Future[R] = submit(work)
        future.add_done_callback(lambda _: self._asked.put(None))
        try:
            while (requests := self._next()) is not None:
                self._answer(requests)
        finally:
            future.cancel()  # without effect after its end
        return future.result()

    def _ask(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._asked.put(waiting)

    def _next(self) -> list[_Request] | None:
        try:
            return self._asked.get(timeout=self._timeout + GRACE_S)
        except Empty:
            raise ConfigError(
                f"no episode went on within {self._timeout + GRACE_S:.0f} s: it blocks its event "
                "loop, so await what takes long."
            ) from None

    def _answer(self, requests: list[_Request]) -> None:
        """Sample, for each length limit and set of stop tokens in one batch."""
        alike: dict[tuple[int, tuple[int, ...]], list[_Request]] = {}
        for request in requests:
            alike.setdefault((request.max_new_tokens, request.stop), []).append(request)
        done: list[tuple[_Request, Generation]] = []
        for (most, stop), batch in alike.items():
            done += zip(batch, self._sample(batch, most, stop), strict=True)

        def answer() -> None:
            for request, generation in done:
                request.answer(generation)

        # all at once: so the episodes' next requests are again one batch
        requests[0].result.get_loop().call_soon_threadsafe(answer)

    def _sample(
        self, requests: list[_Request], most: int, stop: tuple[int, ...]
    ) -> list[Generation]:
        options = self._options
        eos = options["eos_token_id"]
        ends = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
        prompts = padded(
            [torch.as_tensor(request.tokens, dtype=torch.int64) for request in requests],
            options["pad_token_id"],
        )
        found = generate(
            self._actor,
            prompts,
            **{**options, "max_new_tokens": most, "eos_token_id": [*ends, *stop] or None},
        ).rows(range(len(requests)), device="cpu")
        generations = []
        for row in range(len(requests)):
            mask = found.action_mask[row]
            tokens = found.completion(row).tolist()
            versions = found.token_versions
            generations.append(
                Generation(
                    tokens,
                    found.action_log_probs[row][mask].tolist(),
                    [-1] * len(tokens) if versions is None else versions[row][mask].tolist(),
                    "stop" if found.finished is not None and found.finished[row] else "length",
                )
            )
        return generations
