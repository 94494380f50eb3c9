"""Weights of models on several ranks: gathered to be published, and given to all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, distributed, nn

from redrb.weights.tensors.names import models_tensors
from redrb.weights.tensors.wrapping import unwrapped


@torch.no_grad()
def whole_tensors(models: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Return the tensors of models by name, `<model>.<tensor>`: live ones, or gathered shards.

    Of a sharded model, whose parameters are `DTensor`s, all ranks call it, and each gets all of it.
    """
    inner = {name: unwrapped(model) for name, model in models.items()}
    gathered: dict[int, Tensor] = {}
    found: dict[str, Tensor] = {}
    for name, tensor in models_tensors(inner).items():
        if not hasattr(tensor, "full_tensor"):
            found[name] = tensor
            continue
        if id(tensor) not in gathered:  # tied tensors have two names
            gathered[id(tensor)] = tensor.full_tensor()
        found[name] = gathered[id(tensor)]
    return found


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
            if not hasattr(tensor, "full_tensor"):
                if key in source and source[key] is not tensor:
                    tensor.copy_(source[key])
                distributed.broadcast(tensor, 0)
                continue
            shard: Any = tensor
            empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=shard.to_local().device)
            whole = source.get(key, empty).to(empty)
            tensor.copy_(distribute_tensor(whole, shard.device_mesh, shard.placements))
