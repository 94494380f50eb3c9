"""Bytes into and out of tensors, without a copy where they lie together."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from redrb.weights.tensors.shard import TensorShard
from redrb.weights.wire.delta import Bytes


def plain(tensor: Tensor) -> Tensor:
    """Return a tensor whose elements lie together; itself if they do."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def flat_view(tensor: Tensor) -> Bytes:
    """Return the bytes of a contiguous CPU tensor, not a copy of them."""
    view: Bytes = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return view


def load_in_place(target: TensorShard, value: Tensor, start: tuple[int, ...]) -> None:
    """Copy what a box of values has of a target's elements; `check_fits` was asked before.

    Args:
        target: All of a tensor or a shard of it.
        value: A box of the same tensor, on the CPU.
        start: Index of its first element in the whole tensor.
    """
    live = target.tensor
    with torch.inference_mode(live.is_inference()), torch.no_grad():
        if target.is_whole and tuple(value.shape) == target.shape:
            _copy(value, live)
            return
        ends = zip(start, value.shape, target.start, live.shape, strict=True)
        into, out = [], []
        for first, size, own_first, own_size in ends:
            low, high = max(first, own_first), min(first + size, own_first + own_size)
            if low >= high:
                return
            into.append(slice(low - own_first, high - own_first))
            out.append(slice(low - first, high - first))
        live[tuple(into)].copy_(value[tuple(out)])


def synchronize(targets: Iterable[TensorShard]) -> None:
    """Wait for copies to accelerators: casts are still under way there."""
    for device in {target.tensor.device for target in targets}:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()


def _copy(value: Tensor, target: Tensor) -> None:
    ordinary = target.is_contiguous() and not (target.is_conj() or target.is_neg())
    if target.device.type != "cpu" or target.dtype != value.dtype or not ordinary:
        target.copy_(value)
        return
    # where cores are busy, the barrier of torch's threads takes 20 times as long as the copy
    flat_view(target)[:] = flat_view(value)
    if not target.is_inference():
        increment_version(target)
