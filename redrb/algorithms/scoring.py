"""Rewards of completions, from a reward model or a function."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from redrb.algorithms.completions import Completions
from redrb.algorithms.models import sequence_rewards
from redrb.algorithms.reward import Reward
from redrb.errors import RecordError

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
