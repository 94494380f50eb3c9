"""The processes of a data-parallel trainer or maker, as torch.distributed knows them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import distributed

from redrb import environment
from redrb.errors import ConfigError

_VARIABLES = ("local_rank", "rank", "world_size", "master_port", "master_addr")


def set_environment(values: Mapping[str, Any] | None) -> None:
    """Set the environment variables from which torch.distributed starts.

    Raises:
        ConfigError: There is another name.
    """
    unknown = set(values or ()) - set(_VARIABLES)
    if unknown:
        raise ConfigError(f"env_info has {sorted(unknown)}; it may have {list(_VARIABLES)}.")
    for name, value in (values or {}).items():
        environment.set_variable(name.upper(), str(value))


def has_process_group() -> bool:
    """Return whether this process has joined a process group."""
    return distributed.is_available() and distributed.is_initialized()


def rank_here() -> int:
    """Return this process's rank, 0 without a process group."""
    return distributed.get_rank() if has_process_group() else 0


def world_size_here() -> int:
    """Return the number of ranks, 1 without a process group."""
    return distributed.get_world_size() if has_process_group() else 1


def mean_over_ranks(values: list[float]) -> list[float]:
    """Return each number averaged over all ranks; every rank must call it."""
    if world_size_here() == 1:
        return values
    total = torch.tensor(values, dtype=torch.float64, device=group_device())
    distributed.all_reduce(total)
    averaged: list[float] = (total / world_size_here()).tolist()
    return averaged


def group_device() -> torch.device:
    """Return the device of tensors that the ranks exchange."""
    return torch.device("cuda" if distributed.get_backend() == "nccl" else "cpu")


def any_rank(condition: bool) -> bool:  # noqa: FBT001
    """Return whether the condition holds on any rank; every rank must call it."""
    if world_size_here() == 1:
        return condition
    return mean_over_ranks([float(condition)])[0] > 0


def newest_common_step(steps: list[int]) -> int | None:
    """Return the newest step that all ranks have, None if no rank has any; all must call it.

    Raises:
        ConfigError: Some ranks have steps, and no step is common to all.
    """
    if world_size_here() == 1:
        return max(steps, default=None)
    by_rank: list[list[int]] = [[] for _ in range(world_size_here())]
    distributed.all_gather_object(by_rank, steps)
    common = set.intersection(*map(set, by_rank))
    if not common and any(by_rank):
        raise ConfigError(
            f"the ranks have checkpoints of steps {by_rank}, and no step is common to all: give "
            "every rank its old checkpoint_dir, or begin anew in an empty one."
        )
    return max(common, default=None)


def default_device() -> torch.device:
    """Return the current accelerator, or the CPU if there is none."""
    if torch.accelerator.is_available():
        found = torch.accelerator.current_accelerator()
        if found is not None:
            return torch.device(found.type, torch.accelerator.current_device_index())
    return torch.device("cpu")
