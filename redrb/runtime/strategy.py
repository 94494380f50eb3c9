"""How models are placed: on one device, or replicated by DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from redrb.runtime.world import default_device, world_size_here

Model = TypeVar("Model")


class Strategy:
    """Places models on one device; the base of others, and what `strategy_fn` may return.

    Source: the part of `coati.trainer.strategies` that makers and trainers need.
    """

    def __init__(self, device: str | torch.device | None = None) -> None:
        """Use a device; default: the accelerator, where there is one."""
        self.device = default_device() if device is None else torch.device(device)

    @contextmanager
    def model_init_context(self) -> Iterator[None]:
        """Surround the making of models; such as for lazy or sharded initialisation."""
        yield

    def prepare(self, model: Model) -> Model:
        """Return a model ready for use; what is no module, such as a function, stays as it is."""
        return model.to(self.device) if isinstance(model, nn.Module) else model


class DDPStrategy(Strategy):
    """Replicates what is trained over the ranks of torch.distributed."""

    def prepare(self, model: Model) -> Model:
        """Return a model on this rank's device, wrapped where it is trained by several ranks."""
        placed = super().prepare(model)
        if not isinstance(placed, nn.Module) or world_size_here() == 1:
            return placed
        if not any(p.requires_grad for p in placed.parameters()):
            return placed
        ids = [self.device.index] if self.device.type == "cuda" else None
        return DistributedDataParallel(placed, device_ids=ids)  # type: ignore[return-value]
