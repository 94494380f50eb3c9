"""`RankGradients`: gradients of models that several ranks train together."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.utils import clip_grad_norm_

from redrb.algorithms.gradients import Gradients


def gradients_of(model: nn.Module) -> Gradients:
    """Return the gradients of a model: of all ranks, if it is replicated or sharded over them."""
    sharded = any(hasattr(parameter, "full_tensor") for parameter in model.parameters())
    if sharded or isinstance(model, nn.parallel.DistributedDataParallel):
        return RankGradients(sharded=sharded)
    return Gradients()


class RankGradients(Gradients):
    """Averages over the ranks of torch.distributed.

    Args:
        sharded: Whether gradients are sharded: each micro-batch then reduces them, because whole
            gradients would not fit into memory.
    """

    def __init__(self, *, sharded: bool = False) -> None:
        self._sharded = sharded

    def accumulating(self, model: nn.Module, *, last: bool) -> AbstractContextManager[object]:
        """Return the context of one micro-batch; replicas average gradients in the last one."""
        if isinstance(model, nn.parallel.DistributedDataParallel) and not last:
            context: AbstractContextManager[object] = model.no_sync()
            return context
        return nullcontext()

    def clip(self, model: nn.Module, limit: float) -> Tensor:
        """Scale the gradients of a model, of all its shards, to the norm `limit` at most."""
        norm: Any = clip_grad_norm_(list(model.parameters()), limit)
        whole: Tensor = norm.full_tensor() if self._sharded else norm
        return whole

    def mean(self, values: Tensor) -> Tensor:
        """Return numbers `[N]` averaged over the ranks."""
        return self._reduced(values, distributed.ReduceOp.SUM) / distributed.get_world_size()

    def most(self, values: Tensor) -> Tensor:
        """Return the largest of each number `[N]` on any rank."""
        return self._reduced(values, distributed.ReduceOp.MAX)

    def _reduced(self, values: Tensor, how: distributed.ReduceOp.RedOpType) -> Tensor:
        on_accelerator = distributed.get_backend() == "nccl"
        device = torch.device("cuda") if on_accelerator else torch.device("cpu")
        reduced = values.detach().to(device, copy=True)
        distributed.all_reduce(reduced, how)
        return reduced.to(values.device)
