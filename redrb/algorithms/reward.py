"""Rewards of completions: from a function (`Reward`), or from a reward model."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from redrb.algorithms.completions import Completion, Completions, Decode
from redrb.algorithms.event_loop import submit
from redrb.algorithms.models import sequence_rewards
from redrb.checks import checked_number
from redrb.errors import ConfigError, RecordError
from redrb.experience.faults import Fault, log_filtered, raised

Ready: TypeAlias = tuple[list[int], list[float]]
"""Rows of completions, and the reward of each."""

Results: TypeAlias = list[Any] | dict[int, Any]
"""What the function returned for each row, or its exception."""

TOGETHER_S = 0.1
"""Groups whose rewards a plain function gives within so many seconds come together."""

_REWARD = "the reward"

_GRACE_S = 10.0
"""How long the time limit of a reward may be late, because its event loop is busy."""


class Reward:
    """Scores completions one by one, or all of a batch at once.

    A group with a completion for which the function raises, or returns None, nan or an infinite
    number, gets the reward nan: makers of redrb filter such a group, and the others are sent. A log
    line names the reason, with the line of the code. A function of all completions that raises is
    called again with each group alone.

    Example:
        >>> def correct(completion):
        ...     return float(completion.text.strip() == completion["answer"])
        >>> maker = GRPOExperienceMaker(actor, Reward(correct, decode=tokenizer.decode))
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        decode: Decode | None = None,
        batched: bool = False,
        timeout: float = 300.0,
    ) -> None:
        """Make a reward.

        Args:
            function: Gets a `Completion` and returns its reward. A coroutine function is called for
                all completions of a batch at the same time, and groups whose rewards are there
                first are sent first.
            decode: Returns the text of token ids, such as `tokenizer.decode`.
            batched: The function gets a list of completions, and returns a reward for each, in a
                list or a tensor.
            timeout: Seconds for which a call of a coroutine function may last.

        Raises:
            ConfigError: An argument is not usable.
        """
        if not callable(function):
            raise ConfigError(f"function={function!r:.80}: give a function of a completion.")
        self._function = function
        self._decode = decode
        self._batched = batched
        self._timeout = checked_number("timeout", timeout)
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 (the method of an object)
        )

    @property
    def comes_in_parts(self) -> bool:
        """Whether some rewards of a batch may be there before others."""
        return not self._batched

    def __call__(self, completions: Completions, group_size: int = 1) -> list[float]:
        """Return the reward of each completion; nan in groups that are to be filtered."""
        rewards = [math.nan] * len(completions)
        for rows, found in self.as_ready(completions, group_size):
            for row, reward in zip(rows, found, strict=True):
                rewards[row] = reward
        return rewards

    def as_ready(self, completions: Completions, group_size: int = 1) -> Iterator[Ready]:
        """Yield the rows of groups and their rewards, groups that are ready first go first.

        Args:
            completions: B completions; those of a group are neighbours.
            group_size: Completions of a group.

        Raises:
            RecordError: A function of all completions returned another number of rewards.
        """
        count = len(completions)
        groups = [list(range(first, first + group_size)) for first in range(0, count, group_size)]
        for ready, results in self._ready(completions, groups):
            yield _joined(ready, results)

    def of_each(self, completions: Completions) -> list[tuple[float, str]]:
        """Return the reward of each completion and "", or nan and why it has none.

        Unlike a call, it scores completions without their groups, and logs nothing.

        Raises:
            RecordError: A function of all completions returned another number of rewards.
        """
        found = [(math.nan, "")] * len(completions)
        for ready, results in self._ready(completions, [[row] for row in range(len(completions))]):
            for [row] in ready:
                reward, fault = _number(results[row])
                found[row] = (reward, fault.how if fault else "")
        return found

    def _ready(
        self, completions: Completions, groups: list[list[int]]
    ) -> Iterator[tuple[list[list[int]], Results]]:
        """Yield groups that are ready, and results of which these groups have all."""
        each = completions.each(self._decode)
        if self._batched:
            yield groups, self._batch(each, groups)
        elif self._is_async:
            yield from self._together(each, groups)
        else:
            yield from self._in_turn(each, groups)

    def _in_turn(
        self, each: Sequence[Completion], groups: Sequence[list[int]]
    ) -> Iterator[tuple[list[list[int]], Results]]:
        """Call a plain function for each completion; yield all groups at once if it is fast."""
        results: dict[int, Any] = {}
        ready: list[list[int]] = []
        began = time.monotonic()
        for rows in groups:
            results |= {row: _attempt(partial(self._function, each[row])) for row in rows}
            ready.append(rows)
            if time.monotonic() - began >= TOGETHER_S:
                yield ready, results
                ready, began = [], time.monotonic()
        if ready:
            yield ready, results

    def _together(
        self, each: Sequence[Completion], groups: Sequence[list[int]]
    ) -> Iterator[tuple[list[list[int]], Results]]:
        """Call a coroutine function for all completions, and yield groups as they are ready."""
        done: SimpleQueue[tuple[int, Any]] = SimpleQueue()

        async def one(row: int) -> None:
            done.put((row, await self._limited(self._function(each[row]))))

        async def every() -> None:
            await asyncio.gather(*map(one, range(len(each))))

        group_of = {row: number for number, rows in enumerate(groups) for row in rows}
        missing = [len(rows) for rows in groups]
        results: dict[int, Any] = {}
        future: Future[None] = submit(every())
        try:
            while len(results) < len(each):
                ready = []
                for row, result in self._arrived(done):
                    results[row] = result
                    missing[group_of[row]] -= 1
                    if not missing[group_of[row]]:
                        ready.append(groups[group_of[row]])
                if ready:
                    yield ready, results
        finally:
            future.cancel()

    def _arrived(self, done: SimpleQueue[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
        """Wait for a result; yield it and all others that are there."""
        try:
            yield done.get(timeout=self._timeout + _GRACE_S)
        except Empty:
            raise ConfigError(
                f"no reward came within {self._timeout + _GRACE_S:.0f} s: the coroutine function "
                "blocks its event loop, or raise timeout."
            ) from None
        while not done.empty():
            yield done.get()

    async def _limited(self, call: Awaitable[Any]) -> Any:
        """Await a call for `timeout` seconds; returns its exception if it raises."""
        try:
            async with asyncio.timeout(self._timeout):
                return await call
        except Exception as error:  # noqa: BLE001 (the user's function: its group is filtered)
            return error

    def _batch(self, each: Sequence[Completion], groups: Sequence[list[int]]) -> list[Any]:
        """Call a function of all completions; if it raises, once more with each group alone."""
        found = _attempt(partial(self._call, each))
        if not isinstance(found, Exception):
            return self._checked(found, len(each))
        if len(groups) == 1:
            return [found] * len(each)
        results: list[Any] = []
        for rows in groups:
            alone = _attempt(partial(self._call, [each[row] for row in rows]))
            failed = isinstance(alone, Exception)
            results += [alone] * len(rows) if failed else self._checked(alone, len(rows))
        return results

    def _call(self, each: Sequence[Completion]) -> Any:
        if not self._is_async:
            return self._function(each)
        result = submit(self._limited(self._function(each))).result(self._timeout + _GRACE_S)
        if isinstance(result, Exception):
            raise result
        return result

    def _checked(self, found: Any, count: int) -> list[Any]:
        values = found.tolist() if hasattr(found, "tolist") else found
        if isinstance(values, str) or not isinstance(values, Sequence) or len(values) != count:
            raise RecordError(
                f"the reward function returned {found!r:.80} for {count} completions: return a "
                "list or a tensor with a number for each.",
                field="reward",
            )
        return list(values)


def _attempt(call: Callable[[], Any]) -> Any:
    """Return the result of a call, or its exception."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001 (the user's function: its group is filtered)
        return error


def _joined(groups: Sequence[Sequence[int]], results: Results) -> Ready:
    """Return the rows of groups with their rewards; nan in groups with a failed one."""
    rows: list[int] = []
    rewards: list[float] = []
    failed: dict[str, list[tuple[Fault, int, int]]] = defaultdict(list)
    for group in groups:
        found = [_number(results[row]) for row in group]
        faults = [fault for _, fault in found if fault]
        if faults:
            failed[faults[0].kind].append((faults[0], len(faults), len(group)))
        rows += group
        rewards += [math.nan] * len(group) if faults else [number for number, _ in found]
    for each in failed.values():
        _log_failed(each)
    return rows, rewards


def _log_failed(groups: Sequence[tuple[Fault, int, int]]) -> None:
    """Log groups that failed for one reason: the fault, failed completions, all completions."""
    fault, failed = groups[0][0], sum(count for _, count, _ in groups)
    completions = sum(size for _, _, size in groups)
    if len(groups) == 1:
        text = f"a group is filtered: {fault.what} of %d of its %d completions %s"
    else:
        text = f"{len(groups)} groups are filtered: {fault.what} of %d of their %d completions %s"
    log_filtered(fault, text, failed, completions, fault.why, groups=len(groups))


def _number(result: Any) -> tuple[float, Fault | None]:
    """Return a reward and None, or nan and what is wrong with it."""
    if isinstance(result, Exception):
        return math.nan, raised(_REWARD, result)
    if result is None:
        return math.nan, _is("is None")
    try:
        number = float(result)
    except (TypeError, ValueError, RuntimeError):
        return math.nan, Fault(_REWARD, f"is no number, but {result!r:.80}", "no number")
    return (number, None) if math.isfinite(number) else (math.nan, _is(f"is {number}"))


def _is(why: str) -> Fault:
    return Fault(_REWARD, why, f"{_REWARD} {why}")


_log = logging.getLogger("redrb")

RewardFunction: TypeAlias = Callable[[Completions], Tensor | Sequence[float | None]]
"""Scores a batch of completions: returns a tensor `[B]` or a sequence of B numbers."""

Scorer: TypeAlias = nn.Module | Reward | RewardFunction
"""A reward model (see `redrb.algorithms.models`), a `Reward`, or a function of completions."""


def scores_of(scorer: Scorer, completions: Completions, group_size: int = 1) -> Tensor:
    """Return the reward of each completion, float32 `[B]`, on the completions' device.

    A reward that a function cannot give, because it raises or returns None, is nan. A function of
    completions that raises is called again with each group alone; a reward model is not.

    Args:
        scorer: Gives the rewards.
        completions: B completions; those of a group are neighbours.
        group_size: Completions of a group.

    Raises:
        RecordError: The scorer did not return one number a sample.
    """
    if isinstance(scorer, nn.Module):
        rewards = sequence_rewards(
            scorer,
            completions.sequences,
            completions.attention_mask,
            inputs=completions.inputs,
        )
    elif isinstance(scorer, Reward):
        rewards = _tensor(scorer(completions, group_size), completions)
    else:
        rewards = _of_function(scorer, completions, group_size)
    if rewards.shape != (len(completions),):
        raise RecordError(
            f"the reward function gave shape {list(rewards.shape)}, not [{len(completions)}]: one "
            "number a sample.",
            field="reward",
        )
    return rewards


def _of_function(function: RewardFunction, completions: Completions, size: int) -> Tensor:
    try:
        found = function(completions)
    except Exception as error:  # noqa: BLE001 (the user's function: its group is filtered)
        if len(completions) <= size:
            _log.warning("a group is filtered: the reward function raised %r", error)
            return _tensor([math.nan] * len(completions), completions)
        parts = [
            completions.rows(range(first, min(first + size, len(completions))))
            for first in range(0, len(completions), size)
        ]
        return torch.cat([scores_of(function, part, size) for part in parts])
    return _tensor(found, completions)


def _tensor(found: Any, completions: Completions) -> Tensor:
    if not isinstance(found, Tensor):
        found = [math.nan if reward is None else reward for reward in found]
    return torch.as_tensor(found, dtype=torch.float32, device=completions.sequences.device)
