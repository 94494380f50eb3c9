"""The processes of a data-parallel trainer or maker, as torch.distributed knows them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, distributed, nn

from redrb import environment
from redrb.errors import ConfigError
from redrb.weights.tensors.names import models_tensors, unwrapped
from redrb.weights.tensors.state import is_dtensor, local_shard


@torch.no_grad()
def whole_tensors(models: Mapping[str, nn.Module], memory: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of models by name, `<model>.<tensor>`: live ones, or gathered shards.

    Of a sharded model, whose parameters are `DTensor`s, all ranks call it. They send their shards
    to the first rank, which gathers them in the memory of its host; the other ranks get only the
    tensors that are not sharded. `memory` holds the gathered tensors until the next call, which
    overwrites them: new memory takes several times as long to fill.
    """
    tensors = models_tensors({name: unwrapped(model) for name, model in models.items()})
    sharded = {name: tensor for name, tensor in tensors.items() if is_dtensor(tensor)}
    if not sharded:
        return tensors
    first: dict[int, str] = {}  # tied tensors have several names, and are sent once
    names = {name: first.setdefault(id(tensor), name) for name, tensor in sharded.items()}
    gathered = _gathered({name: sharded[name] for name in first.values()}, memory)
    return {
        name: gathered[names[name]] if name in names else tensor
        for name, tensor in tensors.items()
        if name not in names or gathered
    }


def _gathered(sharded: Mapping[str, Any], memory: dict[str, Tensor]) -> dict[str, Tensor]:
    """Send this rank's shards to the first rank; there, return the whole tensors."""
    own = {name: local_shard(tensor) for name, tensor in sharded.items() if not _is_copy(tensor)}
    boxes = {
        name: (shard.start, tuple(shard.tensor.shape))
        for name, shard in own.items()
        if shard.tensor.numel()
    }
    of_ranks: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(of_ranks, boxes)
    if distributed.get_rank():
        for name in boxes:
            distributed.send(_flat(own[name].tensor.contiguous()), 0)
        return {}
    whole = {}
    for name, tensor in sharded.items():
        kept = memory.get(name)
        if kept is None or (kept.shape, kept.dtype) != (tensor.shape, tensor.dtype):
            kept = memory[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        whole[name] = kept
    for rank, received in enumerate(of_ranks):
        for name, (start, shape) in received.items():
            place = whole[name][
                tuple(slice(at, at + n) for at, n in zip(start, shape, strict=True))
            ]
            device = sharded[name].to_local().device
            if rank == 0:
                place.copy_(own[name].tensor)
            elif place.is_contiguous() and device.type == "cpu":
                distributed.recv(_flat(place), rank)
            else:
                part = torch.empty(shape, dtype=place.dtype, device=device)
                distributed.recv(_flat(part), rank)
                place.copy_(part)
    return whole


def _is_copy(tensor: Any) -> bool:
    """Whether another rank has the same shard of a `DTensor`, and sends it."""
    coordinate = tensor.device_mesh.get_coordinate() or []
    placed = zip(coordinate, tensor.placements, strict=False)
    return any(at and placement.is_replicate() for at, placement in placed)


def _flat(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor, for backends that do not send every dtype."""
    return tensor.view(-1).view(torch.uint8)


@torch.no_grad()
def give_all_ranks(models: Mapping[str, nn.Module], first: Mapping[str, nn.Module]) -> None:
    """Load the first rank's tensors into the models of all ranks, which may be sharded.

    Args:
        models: The models of this rank; on other devices than `first` only if they are sharded.
        first: On the first rank the models whose tensors count: `models`, or whole ones of the same
            names. Other ranks' are not read.
    """
    from torch.distributed.tensor import distribute_tensor  # imports sympy: half a second

    for name, model in models.items():
        source = first[name].state_dict() if distributed.get_rank() == 0 else {}
        for key, tensor in model.state_dict().items():
            if not is_dtensor(tensor):
                if key in source and source[key] is not tensor:
                    tensor.copy_(source[key])
                distributed.broadcast(tensor, 0)
                continue
            shard: Any = tensor
            empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=shard.to_local().device)
            whole = source.get(key, empty).to(empty)
            tensor.copy_(distribute_tensor(whole, shard.device_mesh, shard.placements))


_VARIABLES = ("local_rank", "rank", "world_size", "master_port", "master_addr")


def set_environment(values: Mapping[str, Any] | None) -> None:
    """Set variables from which torch.distributed starts; raises ConfigError for other names."""
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
