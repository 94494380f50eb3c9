"""Metrics of a training step: shares of micro-batches added up, averaged over ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from redrb.algorithms.aggregation import row_mean
from redrb.algorithms.batches import TrainingBatch
from redrb.algorithms.gradients import Gradients

LARGEST = "_max"
"""End of the names of metrics of which the largest counts; all others are added up."""


class StepMetrics:
    """Metrics of the micro-batches of a step.

    Attributes:
        found: Metrics of all micro-batches so far.
    """

    def __init__(self) -> None:
        self.found: dict[str, Tensor] = {}

    def add(self, metrics: Mapping[str, Tensor]) -> None:
        """Add the shares of one micro-batch: numbers `[]`, whose graphs are not kept."""
        for name, value in metrics.items():
            value = value.detach()
            before = self.found.get(name)
            if before is not None:
                value = torch.maximum(before, value) if name.endswith(LARGEST) else before + value
            self.found[name] = value


def length_metrics(batch: TrainingBatch) -> dict[str, Tensor]:
    """Return `length_mean` and `length_max`: the actions of each sample that count."""
    lengths = batch.action_mask.sum(1).float()
    return {"length_mean": row_mean(lengths, batch.totals), "length_max": lengths.amax()}


def of_all_ranks(metrics: Mapping[str, Tensor], gradients: Gradients) -> dict[str, float]:
    """Return metrics as floats; metrics on one device are copied to the host at once."""
    found = {name: value.detach().float() for name, value in metrics.items()}
    by_device: dict[torch.device, list[str]] = {}
    for name, value in found.items():
        by_device.setdefault(value.device, []).append(name)
    floats: dict[str, float] = {}
    for names in by_device.values():
        values = torch.stack([found[name] for name in names])
        means, largest = gradients.mean(values).tolist(), gradients.most(values).tolist()
        for name, mean, most in zip(names, means, largest, strict=True):
            floats[name] = most if name.endswith(LARGEST) else mean
    return {name: floats[name] for name in found}
