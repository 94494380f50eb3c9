"""Placement of models on one device; `accelerate_strategy.py` places them on several ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import nn

from redrb import environment
from redrb.runtime.world import default_device

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


def _local_device() -> torch.device:
    """Return the accelerator; of several GPUs the one that LOCAL_RANK names, if it is set."""
    device, rank = default_device(), environment.variable("LOCAL_RANK", "")
    if device.type == "cuda" and rank and rank.isdigit() and int(rank) < torch.cuda.device_count():
        return torch.device("cuda", int(rank))
    return device
