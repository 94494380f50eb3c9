"""Groups that makers drop by their mean reward: they still count in the trainer's metrics."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from redrb.algorithms.experience_makers import RAW_REWARD
from redrb.errors import RecordError
from redrb.experience import Experience
from redrb.experience.records import per_sample
from redrb.experience.rows import select_rows
from redrb.stream.sending import GroupedRows
from redrb.train.world import mean_over_ranks

DROPPED_BEFORE = "dropped_before"
"""Key in the extras of a group's first sample: how many samples its maker has dropped since the
group before, and the sum of their rewards."""


class Choice:
    """Says which groups of a maker are trained, and notes in them what was dropped before.

    A group is kept if its mean reward is above `above` and below `below`, or not finite: the task
    drops that one as a bad one, so that nothing is noted in it. Mean and bounds are rounded to the
    type of the rewards: 0.1 in float32 is not above 0.1.

    Attributes:
        dropped: Groups that were dropped; who counts them sets it to 0.
    """

    def __init__(self, above: float, below: float) -> None:
        self._above, self._below, self.dropped = above, below, 0
        self._rewards: list[float] = []  # of dropped samples that are not noted yet

    def extras(self, rewards: Tensor) -> dict[str, Any] | None:
        """Return more extras of the first sample of a new group; None if the group is dropped."""
        values, kind = rewards.tolist(), rewards.dtype
        numbers = [mean(values), self._above, self._below]
        found, above, below = torch.tensor(numbers, dtype=torch.float64).to(
            kind if kind.is_floating_point else torch.float64
        )
        if not found.isfinite():
            return {}
        if found <= above or found >= below:
            self._rewards += values
            self.dropped += 1
            return None
        noted, self._rewards = self._rewards, []
        return {DROPPED_BEFORE: [len(noted), sum(noted)]} if noted else {}

    def kept(self, experience: Experience) -> Iterator[Experience]:
        """Yield the groups of a batch that are trained, in one batch, unless there is none."""
        raw, size = experience.tensors.get(RAW_REWARD, experience.reward), len(experience)
        rewards = torch.full([size], math.nan) if raw is None else raw
        rows, extras = [], per_sample(experience, "extras", size)
        for group in GroupedRows(experience).rows():
            more = self.extras(rewards[list(group)])
            if more is not None:
                rows += group
                extras[group[0]] = {**(extras[group[0]] or {}), **more}
        experience.extras = extras
        if rows:
            yield select_rows(experience, rows)


def of_made(experience: Experience) -> dict[str, float]:
    """Return `made_reward` and `kept_fraction` of all samples that were made for a batch.

    All ranks call it together.

    Raises:
        RecordError: An extra has the key of the notes, and is none.
    """
    raw = experience.tensors.get(RAW_REWARD, experience.reward)
    kept = made = float(len(experience))
    rewards = 0.0 if raw is None else float(raw.float().sum())
    try:
        for extras in per_sample(experience, "extras", len(experience)):
            dropped, reward = (extras or {}).get(DROPPED_BEFORE, (0, 0.0))
            made, rewards = made + dropped, rewards + reward
    except (TypeError, ValueError) as error:
        text = f"the extra {DROPPED_BEFORE!r} is no pair of numbers; use another name for yours."
        raise RecordError(text, field="extras") from error
    kept, made, rewards = mean_over_ranks([kept, made, rewards])
    return {"made_reward": rewards / made, "kept_fraction": kept / made}
