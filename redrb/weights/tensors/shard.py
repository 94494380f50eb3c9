"""`TensorShard`: a box of a larger tensor, such as one rank's part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from redrb.errors import ConfigError


@dataclass(frozen=True, slots=True, eq=False)
class TensorShard:
    """A box of a larger tensor: the part that one rank has.

    `DTensor`s need no `TensorShard`; it is for shards that are plain tensors.

    Args:
        tensor: The elements from `start` to `start + tensor.shape`.
        shape: Shape of the whole tensor.
        start: Index of the first element in the whole tensor.

    Raises:
        ConfigError: `tensor` is not a tensor, or the box is not inside of `shape`.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    start: tuple[int, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.tensor, Tensor):
            raise ConfigError(f"TensorShard of a {type(self.tensor).__name__}: give it a tensor.")
        sizes = tuple(self.tensor.shape)
        fits = len(sizes) == len(self.start) == len(self.shape) and all(
            at >= 0 and at + size <= whole
            for at, size, whole in zip(self.start, sizes, self.shape, strict=True)
        )
        if not fits:
            raise ConfigError(
                f"a shard of {list(sizes)} that starts at {list(self.start)} is not inside of "
                f"{list(self.shape)}."
            )

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
