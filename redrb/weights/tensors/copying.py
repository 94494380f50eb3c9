"""Bytes of tensors without a copy, and copies of values into live tensors."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from redrb.weights.tensors.shard import TensorShard
from redrb.weights.wire.delta import Bytes


def plain(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor; the same tensor if it is contiguous."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def flat_view(tensor: Tensor) -> Bytes:
    """Return a view of the bytes of a contiguous CPU tensor."""
    view: Bytes = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return view


def load_in_place(target: TensorShard, value: Tensor) -> None:
    """Copy a tensor, or the box of it that the target holds; `check_fits` was called before.

    Args:
        target: A whole tensor or a shard.
        value: The whole tensor, on the CPU.
    """
    live = target.tensor
    with torch.inference_mode(live.is_inference()), torch.no_grad():
        if target.is_whole:
            _copy(value, live)
        else:
            box = zip(target.start, live.shape, strict=True)
            live.copy_(value[tuple(slice(at, at + size) for at, size in box)])


def synchronize(targets: Iterable[TensorShard]) -> None:
    """Wait for copies and casts that are under way on accelerators."""
    for device in {target.tensor.device for target in targets}:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()


def _copy(value: Tensor, target: Tensor) -> None:
    ordinary = target.is_contiguous() and not (target.is_conj() or target.is_neg())
    if target.device.type != "cpu" or target.dtype != value.dtype or not ordinary:
        target.copy_(value)
        return
    # not copy_: on busy cores the barrier of torch's threads takes 20 times as long as the copy
    flat_view(target)[:] = flat_view(value)
    if not target.is_inference():
        increment_version(target)
