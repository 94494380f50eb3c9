"""The tensors of a version to publish: checked, and laid out in chunks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from redrb.errors import EncodeError
from redrb.weights.tensors.dtypes import CASTABLE, DTYPE_NAMES
from redrb.weights.tensors.names import StateLike, describe_type, named_values
from redrb.weights.tensors.shard import TensorShard, is_dtensor, local_shard
from redrb.weights.wire.layout import ALIGNMENT, Layout, Piece, TensorEntry
from redrb.weights.wire.manifest import MAX_NAME_LENGTH, MAX_TENSORS


def state_shards(state: StateLike) -> dict[str, TensorShard]:
    """Return the checked tensors of a state; of a `DTensor`, this rank's part.

    Raises:
        EncodeError: A value cannot be published.
    """
    shards: dict[str, TensorShard] = {}
    names = 0
    for name, value in named_values(state):
        if name in shards:
            raise EncodeError(f"the state has two tensors named {name!r}.")
        _check_name(name)
        names += 1
        shard = value if isinstance(value, TensorShard) else _shard_of(name, value)
        if shard is None:  # another rank publishes it
            continue
        _check_publishable(name, shard.tensor)
        shards[name] = shard
    if not 0 < names <= MAX_TENSORS:
        raise EncodeError(f"a version holds 1 to {MAX_TENSORS} tensors, not {names}.")
    return shards


def lay_out(
    shards: Mapping[str, TensorShard], chunk_bytes: int, cast: torch.dtype | None = None
) -> Layout:
    """Give each tensor its place; tied tensors (the same view of one memory) share one.

    Args:
        shards: From `state_shards`.
        chunk_bytes: Bytes of a chunk.
        cast: Dtype that floating-point tensors are published as; default: their present dtype.
    """
    entries: list[TensorEntry] = []
    owners: dict[tuple[object, ...], TensorEntry] = {}
    end = 0
    for name, shard in shards.items():
        tensor = shard.tensor
        view = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        owner = owners.get(view) if tensor.numel() and shard.is_whole else None
        dtype = DTYPE_NAMES[tensor.dtype]
        if cast is not None and dtype in CASTABLE:
            dtype = DTYPE_NAMES[cast]
        if owner is None:
            offset = -(-end // ALIGNMENT) * ALIGNMENT
            piece = Piece(shard.start, tuple(tensor.shape), offset)
            owner = entry = TensorEntry(name, dtype, shard.shape, (piece,))
            owners[view] = entry
            end = offset + piece.elements * entry.item_bytes
        else:
            entry = TensorEntry(name, dtype, shard.shape, owner.pieces, owner.name)
        entries.append(entry)
    nbytes = -(-end // ALIGNMENT) * ALIGNMENT
    return Layout(tuple(entries), nbytes, chunk_bytes)


def _shard_of(name: str, value: Any) -> TensorShard | None:
    if not isinstance(value, Tensor):
        raise EncodeError(f"{name!r:.80} is {describe_type(value)}, not a tensor: leave it out.")
    if not is_dtensor(value):
        return TensorShard.whole(value)
    sharded: Any = value
    placements = sharded.placements
    if any(placement.is_partial() for placement in placements):
        raise EncodeError(f"{name!r} is a DTensor of partial sums: redistribute it first.")
    coordinate = sharded.device_mesh.get_coordinate() or []
    if any(at and placement.is_replicate() for at, placement in zip(coordinate, placements)):  # noqa: B905
        return None
    return local_shard(value)


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_LENGTH:
        raise EncodeError(f"{name!r:.80} is not a tensor's name: 1 to {MAX_NAME_LENGTH} letters.")
    if name.encode(errors="ignore").decode() != name:
        raise EncodeError(f"{name!r:.80} is not a tensor's name: it is not valid in UTF-8.")


def _check_publishable(name: str, tensor: Tensor) -> None:
    if tensor.layout != torch.strided or tensor.is_meta:
        raise EncodeError(f"{name!r} is sparse or on the meta device: there are no plain bytes.")
    if tensor.dtype not in DTYPE_NAMES:
        raise EncodeError(f"{name!r} is {tensor.dtype}, which cannot be published.")
