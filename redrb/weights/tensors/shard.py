"""`TensorShard`: a box of a larger tensor, such as one rank's part; its bytes and their copies."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from redrb.weights.wire.delta import Bytes


@dataclass(frozen=True, slots=True, eq=False)
class TensorShard:
    """A box of a larger tensor: the whole tensor, or the part of a `DTensor` that one rank has.

    Attributes:
        tensor: The elements from `start` to `start + tensor.shape`.
        shape: Shape of the whole tensor.
        start: Index of the first element in the whole tensor.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    start: tuple[int, ...]

    @classmethod
    def whole(cls, tensor: Tensor) -> TensorShard:
        """Return the shard that is the whole tensor."""
        return cls(tensor, tuple(tensor.shape), (0,) * tensor.dim())

    @property
    def is_whole(self) -> bool:
        """Whether the shard is the whole tensor."""
        return tuple(self.tensor.shape) == self.shape


def is_dtensor(value: object) -> bool:
    """Whether a value is a `DTensor`, without importing torch.distributed."""
    return hasattr(value, "full_tensor") and hasattr(value, "placements")


def local_shard(value: Any) -> TensorShard:
    """Return the part of a `DTensor` that this rank holds."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, start = compute_local_shape_and_global_offset(
        value.shape, value.device_mesh, value.placements
    )
    return TensorShard(value.to_local(), tuple(value.shape), tuple(start))


def plain(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor; the same tensor if it is contiguous."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def flat_view(tensor: Tensor) -> Bytes:
    """Return a view of the bytes of a contiguous CPU tensor."""
    view: Bytes = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return view


def load_in_place(target: TensorShard, value: Tensor) -> None:
    """Copy a tensor, or the box of it that the target holds; `check_fits` was called before."""
    live = target.tensor
    with torch.inference_mode(live.is_inference()), torch.no_grad():
        if not target.is_whole:
            box = zip(target.start, live.shape, strict=True)
            live.copy_(value[tuple(slice(at, at + size) for at, size in box)])
            return
        ordinary = live.is_contiguous() and not (live.is_conj() or live.is_neg())
        if live.device.type != "cpu" or live.dtype != value.dtype or not ordinary:
            live.copy_(value)
            return
        # not copy_: on busy cores the barrier of torch's threads takes 20 times as long as the copy
        flat_view(live)[:] = flat_view(value)
        if not live.is_inference():
            increment_version(live)


def synchronize(tensors: Iterable[Tensor]) -> None:
    """Wait for copies and casts that are under way on accelerators: others use other streams."""
    for device in {tensor.device for tensor in tensors}:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
