"""Weights of models that are sharded over ranks, gathered to be published."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

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
