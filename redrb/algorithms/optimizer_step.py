"""The end of a training step: gradients checked and clipped, optimizers stepped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from redrb.algorithms.gradients import Gradients
from redrb.errors import ConfigError, RecordError


def step_optimizers(
    networks: Mapping[str, nn.Module],
    optimizers: Iterable[Optimizer],
    *,
    max_grad_norm: float | None,
    gradients: Gradients,
) -> dict[str, Tensor]:
    """Clip each network's gradients to `max_grad_norm`, then step all optimizers, or none.

    Returns:
        `<name>_grad_norm` of each network before clipping, float32 `[]`.

    Raises:
        RecordError: A gradient is not finite. No optimizer was stepped.
    """
    limit = torch.inf if max_grad_norm is None else max_grad_norm
    norms = {
        f"{name}_grad_norm": gradients.clip(network, limit) for name, network in networks.items()
    }
    distinct = list({id(optimizer): optimizer for optimizer in optimizers}.values())
    for name, norm in norms.items():
        if not bool(norm.isfinite()):
            for optimizer in distinct:
                optimizer.zero_grad()
            raise RecordError(
                f"{name} is {norm.item()}: a field of the batch is not finite, or training has "
                "diverged. The weights are as they were: reject this batch, or take smaller steps."
            )
    for optimizer in distinct:
        optimizer.step()
    return norms


def check_positive(**options: float | None) -> None:
    """Raise ConfigError for the first option that is neither None nor above 0."""
    for name, value in options.items():
        if value is not None and not value > 0:
            raise ConfigError(f"{name} {value} must be above 0.")


def check_not_negative(**options: float) -> None:
    """Raise ConfigError for the first option that is below 0."""
    for name, value in options.items():
        if not value >= 0:
            raise ConfigError(f"{name} {value} must be at least 0.")
