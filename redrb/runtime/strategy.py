"""Placement of models on one device; `accelerate_strategy.py` places them on several ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import nn

from redrb import environment
from redrb.errors import ConfigError
from redrb.runtime.world import default_device

Model = TypeVar("Model")


class Strategy:
    """Places models on one device. Base of other strategies; `strategy_fn` returns one.

    Source: the part of `coati.trainer.strategies` that makers and trainers need.
    """

    def __init__(self, device: str | torch.device | None = None) -> None:
        """Use a device; default: the accelerator if there is one, with CUDA that of LOCAL_RANK.

        Raises:
            ConfigError: There is no such device.
        """
        self.device = _local_device() if device is None else _checked_device(device)

    @contextmanager
    def model_init_context(self) -> Iterator[None]:
        """Context in which models are made, such as for lazy or sharded initialisation."""
        yield

    def prepare(self, model: Model) -> Model:
        """Return a model ready for use; anything but a module is returned unchanged."""
        return model.to(self.device) if isinstance(model, nn.Module) else model


def _checked_device(device: str | torch.device) -> torch.device:
    """Return a device that torch can use; "cuda" is that of LOCAL_RANK, if it is set."""
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device={device!r:.80} is none: use cpu, cuda or cuda:0.") from error
    if chosen.type != "cuda":
        return chosen
    count = torch.cuda.device_count()
    if (chosen.index or 0) >= count:
        build = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "has no CUDA"
        raise ConfigError(
            f"device={device!s}: torch {torch.__version__}, which {build}, finds {count} GPUs. "
            "Install a torch with CUDA, give the process or container a GPU, or use another device."
        )
    return chosen if chosen.index is not None else _local_device()


def _local_device() -> torch.device:
    """Return the accelerator; of several GPUs the one that LOCAL_RANK names, if it is set."""
    device, rank = default_device(), environment.variable("LOCAL_RANK", "")
    if device.type == "cuda" and rank and rank.isdigit() and int(rank) < torch.cuda.device_count():
        return torch.device("cuda", int(rank))
    return device
