"""The processes of a data-parallel trainer or maker, as torch.distributed knows them."""

from __future__ import annotations

import torch
from torch import distributed

from redrb.errors import ConfigError


def _initialised() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def rank_here() -> int:
    """Return this process's rank, 0 where there is no process group."""
    return distributed.get_rank() if _initialised() else 0


def world_size_here() -> int:
    """Return the number of ranks, 1 where there is no process group."""
    return distributed.get_world_size() if _initialised() else 1


def mean_over_ranks(values: list[float]) -> list[float]:
    """Return each number averaged over all ranks; every rank must call it."""
    if world_size_here() == 1:
        return values
    on_accelerator = distributed.get_backend() == "nccl"
    device = torch.device("cuda" if on_accelerator else "cpu")
    total = torch.tensor(values, dtype=torch.float64, device=device)
    distributed.all_reduce(total)
    averaged: list[float] = (total / world_size_here()).tolist()
    return averaged


def agreed(wish: bool) -> bool:  # noqa: FBT001
    """Return whether any rank wishes it; every rank must call it at the same point."""
    if world_size_here() == 1:
        return wish
    return mean_over_ranks([float(wish)])[0] > 0


def newest_common(own: list[int]) -> int | None:
    """Return the largest number that every rank has, None where no rank has any; all must call it.

    Raises:
        ConfigError: Some have numbers, and there is none that all have.
    """
    if world_size_here() == 1:
        return max(own, default=None)
    everyone: list[list[int]] = [[] for _ in range(world_size_here())]
    distributed.all_gather_object(everyone, own)
    common = set.intersection(*map(set, everyone))
    if not common and any(everyone):
        raise ConfigError(
            f"the ranks have checkpoints of steps {everyone}, and none that all have: give every "
            "rank its checkpoint_dir back, or begin anew in an empty one."
        )
    return max(common, default=None)


def default_device() -> torch.device:
    """Return the current accelerator, or the CPU where there is none."""
    if torch.accelerator.is_available():
        found = torch.accelerator.current_accelerator()
        if found is not None:
            return torch.device(found.type, torch.accelerator.current_device_index())
    return torch.device("cpu")
