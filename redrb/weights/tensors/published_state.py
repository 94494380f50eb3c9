"""The tensors of a version to publish: checked, and laid out in chunks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from redrb.errors import EncodeError
from redrb.weights.tensors.dtypes import CASTABLE, DTYPE_NAMES
from redrb.weights.tensors.names import StateLike, describe_type, named_values
from redrb.weights.tensors.shard import is_dtensor
from redrb.weights.wire.layout import ALIGNMENT, MAX_NAME_LENGTH, Layout, TensorEntry
from redrb.weights.wire.manifest import MAX_TENSORS


def published_tensors(state: StateLike) -> dict[str, Tensor]:
    """Return the checked tensors of a state, or raise EncodeError."""
    tensors: dict[str, Tensor] = {}
    for name, value in named_values(state):
        if name in tensors:
            raise EncodeError(f"the state has two tensors named {name!r}.")
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_LENGTH:
            raise EncodeError(
                f"{name!r:.80} is not a tensor's name: 1 to {MAX_NAME_LENGTH} letters."
            )
        if name.encode(errors="ignore").decode() != name:
            raise EncodeError(f"{name!r:.80} is not a tensor's name: it is not valid in UTF-8.")
        if not isinstance(value, Tensor):
            raise EncodeError(
                f"{name!r:.80} is {describe_type(value)}, not a tensor: leave it out."
            )
        if is_dtensor(value):
            raise EncodeError(
                f"{name!r} is sharded over ranks: call its full_tensor() on all ranks, and publish "
                "the result on one of them."
            )
        if value.layout != torch.strided or value.is_meta:
            raise EncodeError(
                f"{name!r} is sparse or on the meta device: there are no plain bytes."
            )
        if value.dtype not in DTYPE_NAMES:
            raise EncodeError(f"{name!r} is {value.dtype}, which cannot be published.")
        tensors[name] = value
    if not 0 < len(tensors) <= MAX_TENSORS:
        raise EncodeError(f"a version holds 1 to {MAX_TENSORS} tensors, not {len(tensors)}.")
    return tensors


def lay_out(
    tensors: Mapping[str, Tensor], chunk_bytes: int, cast: torch.dtype | None = None
) -> Layout:
    """Give each tensor its place; tied tensors (the same view of one memory) share one."""
    entries: list[TensorEntry] = []
    owners: dict[tuple[object, ...], TensorEntry] = {}
    end = 0
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        view = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        owner = owners.get(view) if tensor.numel() else None
        dtype = DTYPE_NAMES[tensor.dtype]
        if cast is not None and dtype in CASTABLE:
            dtype = DTYPE_NAMES[cast]
        if owner is None:
            offset = -(-end // ALIGNMENT) * ALIGNMENT
            owners[view] = entry = TensorEntry(name, dtype, shape, offset)
            end = offset + entry.nbytes
        else:
            entry = TensorEntry(name, dtype, shape, owner.offset, owner.name)
        entries.append(entry)
    nbytes = -(-end // ALIGNMENT) * ALIGNMENT
    return Layout(tuple(entries), nbytes, chunk_bytes)
