"""Rewards of completions: from a function (`Reward`), or from a reward model."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from redrb.algorithms.completions import Completions, Decode
from redrb.algorithms.models import sequence_rewards
from redrb.algorithms.user_functions import Calls, attempt
from redrb.checks import checked_number
from redrb.errors import ConfigError, RecordError
from redrb.experience.faults import Fault, log_filtered, raised

Ready: TypeAlias = tuple[list[int], list[float]]

Results: TypeAlias = list[Any] | dict[int, Any]
"""What the function returned for each row, or its exception."""

_REWARD = "the reward"


class Reward:
    """Scores completions one by one, or all of a batch at once.

    A group with a completion for which the function raises, or returns None, nan or an infinite
    number, gets the reward nan: makers of redrb filter such a group, and the others are sent. A log
    line names the reason, with the line of the code. A function of all completions that raises is
    called again with each group alone.

    Examples:
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

    @property
    def comes_in_parts(self) -> bool:
        """Whether some rewards of a batch may be there before others."""
        return not self._batched

    def __call__(self, completions: Completions, group_size: int = 1) -> list[float]:
        """Return the reward of each completion; nan in groups that are to be filtered."""
        found: dict[int, float] = {}
        for rows, rewards in self.as_ready(completions, group_size):
            found.update(zip(rows, rewards, strict=True))
        return [found[row] for row in range(len(completions))]

    def as_ready(self, completions: Completions, group_size: int = 1) -> Iterator[Ready]:
        """Yield the rows of groups and their rewards, groups that are ready first go first.

        Args:
            completions: B completions; those of a group are neighbours.

        Raises:
            RecordError: A function of all completions returned another number of rewards.
        """
        for ready, results in self._ready(completions, _groups(len(completions), group_size)):
            yield _joined(ready, results)

    def of_each(self, completions: Completions) -> list[tuple[float, str]]:
        """Return the reward of each completion and "", or nan and why it has none.

        Unlike a call, it scores completions without their groups, and logs nothing.

        Raises:
            RecordError: A function of all completions returned another number of rewards.
        """
        found = [(math.nan, "")] * len(completions)
        for ready, results in self._ready(completions, _groups(len(completions), 1)):
            for [row] in ready:
                reward, fault = _number(results[row])
                found[row] = (reward, fault.how if fault else "")
        return found

    def _ready(
        self, completions: Completions, groups: list[list[int]]
    ) -> Iterator[tuple[list[list[int]], Results]]:
        """Yield groups that are ready, and results of which these groups have all."""
        calls = Calls(self._timeout)
        if self._batched:

            def call(rows: list[int]) -> Any:
                result = calls.result(partial(self._function, self._some(completions, rows)))
                if isinstance(result, Exception):
                    raise result
                return result

            yield groups, _of_batch(call, groups)
            return
        each = completions.each(self._decode)
        group_of = {row: number for number, rows in enumerate(groups) for row in rows}
        missing = [len(rows) for rows in groups]
        results: dict[int, Any] = {}
        for arrived in calls.results([partial(self._function, one) for one in each]):
            ready = []
            for row, result in arrived:
                results[row] = result
                missing[group_of[row]] -= 1
                if not missing[group_of[row]]:
                    ready.append(groups[group_of[row]])
            if ready:
                yield ready, results

    def _some(self, completions: Completions, rows: list[int]) -> Any:
        """Return some completions, as a function of several gets them."""
        each = completions.each(self._decode)
        return [each[row] for row in rows]


class _OfCompletions(Reward):
    """Scores by a function of `Completions`."""

    def _some(self, completions: Completions, rows: list[int]) -> Completions:
        return completions if len(rows) == len(completions) else completions.rows(rows)


def _groups(count: int, size: int) -> list[list[int]]:
    return [list(range(first, min(first + size, count))) for first in range(0, count, size)]


def _of_batch(call: Callable[[list[int]], Any], groups: Sequence[list[int]]) -> list[Any]:
    """Return what a function of several completions gives each; rows of failed groups get why.

    If the call for all of them raises, it is made again for each group alone.
    """
    rows = [row for group in groups for row in group]
    found = attempt(partial(call, rows))
    if isinstance(found, Exception):
        if len(groups) == 1:
            return [found] * len(rows)
        return [result for group in groups for result in _of_batch(call, [group])]
    values = found.tolist() if hasattr(found, "tolist") else found
    if isinstance(values, Iterable) and not isinstance(values, str):
        values = list(values)
    shape = tuple(getattr(found, "shape", (len(rows),)))
    if not isinstance(values, list) or shape != (len(rows),) or len(values) != len(rows):
        raise RecordError(
            f"the reward function returned {found!r:.80} for {len(rows)} completions: return a "
            "list or a tensor with a number for each.",
            field="reward",
        )
    return values


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
    for alike in failed.values():
        fault, count = alike[0][0], sum(bad for _, bad, _ in alike)
        several = len(alike) > 1
        said = f"{len(alike)} groups are filtered" if several else "a group is filtered"
        text = f"{said}: {fault.what} of %d of {'their' if several else 'its'} %d completions %s"
        size = sum(size for _, _, size in alike)
        log_filtered(fault, text, count, size, fault.why, groups=len(alike))
    return rows, rewards


def _number(result: Any) -> tuple[float, Fault | None]:
    if isinstance(result, Exception):
        return math.nan, raised(_REWARD, result)
    try:
        number = math.nan if result is None else float(result)
    except (TypeError, ValueError, RuntimeError):
        return math.nan, Fault(_REWARD, f"is no number, but {result!r:.80}", "no number")
    if math.isfinite(number):
        return number, None
    why = f"is {result if result is None else number}"
    return math.nan, Fault(_REWARD, why, f"{_REWARD} {why}")


RewardFunction: TypeAlias = Callable[[Completions], Tensor | Sequence[float | None]]
"""Scores a batch of completions: returns a tensor `[B]` or a sequence of B numbers."""

Scorer: TypeAlias = nn.Module | Reward | RewardFunction
"""A reward model (see `redrb.algorithms.models`), a `Reward`, or a function of completions."""


def scores_of(scorer: Scorer, completions: Completions, group_size: int = 1) -> Tensor:
    """Return the reward of each completion, float32 `[B]`, on the completions' device.

    A reward that a function cannot give, because it raises or returns None, is nan. A function of
    completions that raises is called again with each group alone; a reward model is not.

    Raises:
        RecordError: The scorer did not return one number a sample.
    """
    if isinstance(scorer, nn.Module):
        return sequence_rewards(
            scorer,
            completions.sequences,
            completions.attention_mask,
            inputs=completions.inputs,
        )
    reward = scorer if isinstance(scorer, Reward) else _OfCompletions(scorer, batched=True)
    rewards = reward(completions, group_size)
    return torch.tensor(rewards, dtype=torch.float32, device=completions.sequences.device)
