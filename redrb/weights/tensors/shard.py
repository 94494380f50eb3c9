"""`TensorShard`: a box of a larger tensor, such as one rank's part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


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
