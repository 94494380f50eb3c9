"""Rewards of completions, from a reward model or a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

from redrb.algorithms.generation import Completions
from redrb.algorithms.models import sequence_rewards
from redrb.errors import RecordError

RewardFunction: TypeAlias = Callable[[Completions], Tensor | Sequence[float]]
"""Scores a batch of completions: returns a tensor `[B]` or a sequence of B floats."""

Scorer: TypeAlias = nn.Module | RewardFunction
"""A reward model (see `redrb.algorithms.models`), or a function of completions."""


def scores_of(scorer: Scorer, completions: Completions) -> Tensor:
    """Return the reward of each completion, float32 `[B]`, on the completions' device.

    Raises:
        RecordError: The scorer did not return one number a sample.
    """
    if isinstance(scorer, nn.Module):
        rewards = sequence_rewards(scorer, completions.sequences, completions.attention_mask)
    else:
        rewards = torch.as_tensor(
            scorer(completions), dtype=torch.float32, device=completions.sequences.device
        )
    if rewards.shape != (len(completions),):
        raise RecordError(
            f"the reward function gave shape {list(rewards.shape)}, not [{len(completions)}]: one "
            "number a sample.",
            field="reward",
        )
    return rewards
