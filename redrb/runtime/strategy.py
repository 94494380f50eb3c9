"""How models are placed: on one device, or replicated by DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from redrb import environment
from redrb.errors import ConfigError
from redrb.runtime.world import default_device, world_size_here

Model = TypeVar("Model")


class Strategy:
    """Places models on one device; the base of others, and what `strategy_fn` may return.

    Source: the part of `coati.trainer.strategies` that makers and trainers need.
    """

    def __init__(self, device: str | torch.device | None = None) -> None:
        """Use a device; default: the accelerator, where there is one; of CUDA's LOCAL_RANK's."""
        self.device = _own_device() if device is None else torch.device(device)

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
        """Return a model on this rank's device, wrapped where it is trained by several ranks.

        Raises:
            ConfigError: WORLD_SIZE says that there are several, and there is no process group.
        """
        placed = super().prepare(model)
        if not isinstance(placed, nn.Module):
            return placed
        if not any(p.requires_grad for p in placed.parameters()):
            return placed
        if world_size_here() == 1:
            _check_alone()
            return placed
        ids = [self.device.index] if self.device.type == "cuda" else None
        return DistributedDataParallel(placed, device_ids=ids)  # type: ignore[return-value]


def _own_device() -> torch.device:
    """Return the accelerator; of several GPUs that of LOCAL_RANK, where this is said."""
    device, rank = default_device(), environment.variable("LOCAL_RANK", "")
    if device.type == "cuda" and rank and rank.isdigit() and int(rank) < torch.cuda.device_count():
        return torch.device("cuda", int(rank))
    return device


def _check_alone() -> None:
    """Raise ConfigError where the environment names several ranks, and nobody joined them."""
    size = environment.variable("WORLD_SIZE", "1") or "1"
    joined = distributed.is_available() and distributed.is_initialized()
    if not joined and size.isdigit() and int(size) > 1:
        raise ConfigError(
            f"WORLD_SIZE is {size}, and there is no process group: call "
            "torch.distributed.init_process_group() before the models are made, or use "
            "redrb.Strategy. Nothing would be averaged over the ranks."
        )
