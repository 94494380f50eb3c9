"""What a completion is worth: a reward model's opinion, or a function's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

from redrb.algorithms.generation import Completions
from redrb.algorithms.models import sequence_rewards
from redrb.errors import RecordError

RewardFunction: TypeAlias = Callable[[Completions], Tensor | Sequence[float]]
"""Scores a batch of completions: one number a sample, a tensor `[B]` or a sequence of B floats."""

Scorer: TypeAlias = nn.Module | RewardFunction
"""A reward model (see `redrb.algorithms.models`), or a function of completions."""


def scores_of(scorer: Scorer, completions: Completions) -> Tensor:
    """Return the reward of each completion, float32 `[B]`, where its tokens are.

    Raises:
        RecordError: The scorer gave another number of numbers.
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
