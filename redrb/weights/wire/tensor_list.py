"""The list of tensors in a manifest: written, and read with every number checked."""

from __future__ import annotations

import math
from typing import Any

import msgpack
import xxhash

from redrb.errors import DecodeError
from redrb.weights.wire.field_checks import integer_field, shortened
from redrb.weights.wire.layout import ALIGNMENT, ITEM_BYTES, Layout, TensorEntry
from redrb.weights.wire.manifest import (
    MAX_DIMENSIONS,
    MAX_NAME_LENGTH,
    MAX_TENSORS,
    MAX_VERSION,
)


def layout_hash(layout: Layout) -> int:
    """Return the hash of the names, dtypes, shapes and places of all tensors."""
    return xxhash.xxh3_64_intdigest(msgpack.packb(list_tensors(layout)))


def list_tensors(layout: Layout) -> list[dict[str, Any]]:
    """Return the list of tensors in the form that manifests store."""
    tensors = []
    for tensor in layout.tensors:
        entry: dict[str, Any] = {
            "name": tensor.name,
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "offset": tensor.offset,
        }
        if tensor.alias is not None:
            entry["alias"] = tensor.alias
        tensors.append(entry)
    return tensors


def read_tensors(value: object) -> tuple[TensorEntry, ...]:
    """Return the tensors in a list that came from Redis, after checking every number.

    Raises:
        DecodeError: The list is damaged.
    """
    if not isinstance(value, list) or len(value) > MAX_TENSORS:
        raise DecodeError(f"manifest: tensors is not a list of at most {MAX_TENSORS}.")
    tensors: dict[str, TensorEntry] = {}
    for fields in value:
        tensor = _tensor(fields)
        if tensor.name in tensors:
            raise DecodeError(f"manifest: tensor {shortened(tensor.name)} is listed twice.")
        if tensor.alias is not None:
            _check_alias(tensor, tensors.get(tensor.alias))
        tensors[tensor.name] = tensor
    return tuple(tensors.values())


def _tensor(fields: object) -> TensorEntry:
    if not isinstance(fields, dict):
        raise DecodeError("manifest: an item of tensors is not a map.")
    name, dtype, alias = fields.get("name"), fields.get("dtype"), fields.get("alias")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_LENGTH:
        raise DecodeError(f"manifest: {shortened(name)} is not a tensor's name.")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise DecodeError(
            f"manifest: tensor {shortened(name)} has the unknown dtype {shortened(dtype)}."
        )
    if not (alias is None or isinstance(alias, str)):
        raise DecodeError(f"manifest: tensor {shortened(name)} has the alias {shortened(alias)}.")
    shape = _shape(name, fields.get("shape"), ITEM_BYTES[dtype])
    offset = integer_field(fields, "offset", 0, MAX_VERSION)
    return TensorEntry(name, dtype, shape, offset, alias)


def _shape(name: str, value: object, item_bytes: int) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > MAX_DIMENSIONS:
        raise DecodeError(
            f"manifest: tensor {shortened(name)} has no shape of up to 64 dimensions."
        )
    if not all(type(size) is int and 0 <= size <= MAX_VERSION for size in value):
        raise DecodeError(f"manifest: tensor {shortened(name)} has the shape {shortened(value)}.")
    # sizes beside a 0 count too, since strides are computed from them
    if math.prod(max(size, 1) for size in value) * item_bytes > MAX_VERSION:
        raise DecodeError(
            f"manifest: tensor {shortened(name)} has too large a shape: {shortened(value)}."
        )
    return tuple(value)


def _check_alias(tensor: TensorEntry, owner: TensorEntry | None) -> None:
    if owner is None or owner.alias is not None:
        raise DecodeError(
            f"manifest: {shortened(tensor.name)} is tied to a tensor that is not before it."
        )
    if (owner.dtype, owner.shape, owner.offset) != (tensor.dtype, tensor.shape, tensor.offset):
        raise DecodeError(
            f"manifest: {shortened(tensor.name)} differs from the tensor that it is tied to."
        )


def check_places(layout: Layout) -> None:
    """Check that tensors do not overlap, leave no chunk empty, and end inside of the state.

    Raises:
        DecodeError: They do not.
    """
    end = 0
    for tensor in sorted(layout.tensors, key=lambda tensor: tensor.offset):
        if tensor.offset % ALIGNMENT:
            raise DecodeError(f"manifest: tensor {shortened(tensor.name)} is not aligned.")
        if tensor.alias is None and tensor.nbytes:
            if tensor.offset < end:
                raise DecodeError(f"manifest: tensor {shortened(tensor.name)} overlaps another.")
            if tensor.offset - end >= layout.chunk_bytes:
                raise DecodeError(
                    f"manifest: the chunk before tensor {shortened(tensor.name)} is empty."
                )
            end = tensor.offset + tensor.nbytes
        if max(end, tensor.offset) > layout.nbytes:
            raise DecodeError(
                f"manifest: tensor {shortened(tensor.name)} ends beyond the last byte."
            )
    if layout.nbytes - end >= layout.chunk_bytes:
        raise DecodeError(f"manifest: {layout.nbytes} bytes, but the tensors end at {end}.")
