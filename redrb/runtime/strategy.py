"""Placement of models: on one device, or replicated by DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from redrb import environment
from redrb.errors import ConfigError
from redrb.runtime.world import default_device, has_process_group, world_size_here

Model = TypeVar("Model")


class Strategy:
    """Places models on one device. Base of other strategies; `strategy_fn` returns one.

    Source: the part of `coati.trainer.strategies` that makers and trainers need.
    """

    def __init__(self, device: str | torch.device | None = None) -> None:
        """Use a device; default: the accelerator if there is one, with CUDA that of LOCAL_RANK."""
        self.device = _local_device() if device is None else torch.device(device)

    @contextmanager
    def model_init_context(self) -> Iterator[None]:
        """Context in which models are made, such as for lazy or sharded initialisation."""
        yield

    def prepare(self, model: Model) -> Model:
        """Return a model ready for use; anything but a module is returned unchanged."""
        return model.to(self.device) if isinstance(model, nn.Module) else model


class DDPStrategy(Strategy):
    """Replicates models in training over the ranks of torch.distributed."""

    def prepare(self, model: Model) -> Model:
        """Return a model on this rank's device, wrapped if several ranks train it.

        Raises:
            ConfigError: WORLD_SIZE is above 1, and there is no process group.
        """
        placed = super().prepare(model)
        if not isinstance(placed, nn.Module):
            return placed
        if not any(p.requires_grad for p in placed.parameters()):
            return placed
        if world_size_here() == 1:
            _check_single_process()
            return placed
        ids = [self.device.index] if self.device.type == "cuda" else None
        return DistributedDataParallel(placed, device_ids=ids)  # type: ignore[return-value]


def _local_device() -> torch.device:
    """Return the accelerator; of several GPUs the one that LOCAL_RANK names, if it is set."""
    device, rank = default_device(), environment.variable("LOCAL_RANK", "")
    if device.type == "cuda" and rank and rank.isdigit() and int(rank) < torch.cuda.device_count():
        return torch.device("cuda", int(rank))
    return device


def _check_single_process() -> None:
    """Raise ConfigError if WORLD_SIZE is above 1, and this process joined no process group."""
    size = environment.variable("WORLD_SIZE", "1") or "1"
    if not has_process_group() and size.isdigit() and int(size) > 1:
        raise ConfigError(
            f"WORLD_SIZE is {size}, and there is no process group: call "
            "torch.distributed.init_process_group() before the models are made, or use "
            "redrb.runtime.Strategy. Gradients would not be averaged over the ranks."
        )
