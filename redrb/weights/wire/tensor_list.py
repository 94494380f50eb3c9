"""The list of tensors in a manifest: written, and read with every number checked."""

from __future__ import annotations

import math
from typing import Any

import msgpack
import xxhash

from redrb.errors import DecodeError
from redrb.weights.wire.field_checks import integer_field, shortened
from redrb.weights.wire.layout import ALIGNMENT, ITEM_BYTES, Layout, Piece, TensorEntry, tile
from redrb.weights.wire.manifest import (
    MAX_DIMENSIONS,
    MAX_NAME_LENGTH,
    MAX_PIECES,
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
        }
        if tensor.alias is not None:
            entry["alias"] = tensor.alias
        if _is_whole(tensor):
            entry["offset"] = tensor.pieces[0].offset
        else:
            entry["pieces"] = [
                [list(piece.start), list(piece.shape), piece.offset] for piece in tensor.pieces
            ]
        tensors.append(entry)
    return tensors


def _is_whole(tensor: TensorEntry) -> bool:
    return len(tensor.pieces) == 1 and tensor.pieces[0].shape == tensor.shape


def read_tensors(value: object, *, whole: bool = True) -> tuple[TensorEntry, ...]:
    """Return the tensors in a stored list, after checking every number.

    Args:
        value: The list, as it came from Redis.
        whole: Whether the pieces of each tensor must cover all of it.

    Raises:
        DecodeError: The list is damaged.
    """
    if not isinstance(value, list) or len(value) > MAX_TENSORS:
        raise DecodeError(f"manifest: tensors is not a list of at most {MAX_TENSORS}.")
    tensors: dict[str, TensorEntry] = {}
    pieces = 0
    for fields in value:
        tensor = _tensor(fields, whole=whole)
        pieces += len(tensor.pieces)
        if pieces > MAX_PIECES:
            raise DecodeError(f"manifest: more than {MAX_PIECES} pieces of tensors.")
        if tensor.name in tensors:
            raise DecodeError(f"manifest: tensor {shortened(tensor.name)} is listed twice.")
        if tensor.alias is not None:
            _check_alias(tensor, tensors.get(tensor.alias))
        tensors[tensor.name] = tensor
    return tuple(tensors.values())


def _tensor(fields: object, *, whole: bool) -> TensorEntry:
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
    if "pieces" in fields:
        pieces = _pieces(name, fields["pieces"], shape, whole=whole)
    else:
        offset = integer_field(fields, "offset", 0, MAX_VERSION)
        pieces = (Piece((0,) * len(shape), shape, offset),)
    return TensorEntry(name, dtype, shape, pieces, alias)


def _pieces(name: str, value: object, shape: tuple[int, ...], *, whole: bool) -> tuple[Piece, ...]:
    if not isinstance(value, list) or not 0 < len(value) <= MAX_PIECES:
        raise DecodeError(f"manifest: tensor {shortened(name)} has no list of pieces.")
    pieces = []
    for item in value:
        if not isinstance(item, list) or len(item) != 3:
            raise DecodeError(
                f"manifest: a piece of tensor {shortened(name)} is {shortened(item)}."
            )
        start, size = (_sizes(name, part, len(shape)) for part in item[:2])
        if any(at + most > whole for at, most, whole in zip(start, size, shape, strict=True)):
            raise DecodeError(f"manifest: a piece of tensor {shortened(name)} is outside of it.")
        pieces.append(
            Piece(start, size, integer_field({"offset": item[2]}, "offset", 0, MAX_VERSION))
        )
    if whole and not tile(shape, pieces):
        raise DecodeError(f"manifest: the pieces of tensor {shortened(name)} do not make it up.")
    return tuple(pieces)


def _sizes(name: str, value: object, dimensions: int | None = None) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > MAX_DIMENSIONS:
        raise DecodeError(
            f"manifest: tensor {shortened(name)} has no shape of up to 64 dimensions."
        )
    if not all(type(size) is int and 0 <= size <= MAX_VERSION for size in value):
        raise DecodeError(f"manifest: tensor {shortened(name)} has the shape {shortened(value)}.")
    if dimensions is not None and len(value) != dimensions:
        raise DecodeError(f"manifest: a piece of tensor {shortened(name)} has {shortened(value)}.")
    return tuple(value)


def _shape(name: str, value: object, item_bytes: int) -> tuple[int, ...]:
    sizes = _sizes(name, value)
    # sizes beside a 0 count too, since strides are computed from them
    if math.prod(max(size, 1) for size in sizes) * item_bytes > MAX_VERSION:
        raise DecodeError(
            f"manifest: tensor {shortened(name)} has too large a shape: {shortened(sizes)}."
        )
    return sizes


def _check_alias(tensor: TensorEntry, owner: TensorEntry | None) -> None:
    if owner is None or owner.alias is not None:
        raise DecodeError(
            f"manifest: {shortened(tensor.name)} is tied to a tensor that is not before it."
        )
    if (owner.dtype, owner.shape, owner.pieces) != (tensor.dtype, tensor.shape, tensor.pieces):
        raise DecodeError(
            f"manifest: {shortened(tensor.name)} differs from the tensor that it is tied to."
        )


def check_places(layout: Layout) -> None:
    """Check that tensors do not overlap, leave no chunk empty, and end inside of the state.

    Raises:
        DecodeError: They do not.
    """
    end = 0
    pieces = ((piece, tensor) for tensor in layout.tensors for piece in tensor.pieces)
    for piece, tensor in sorted(pieces, key=lambda pair: pair[0].offset):
        if piece.offset % ALIGNMENT:
            raise DecodeError(f"manifest: tensor {shortened(tensor.name)} is not aligned.")
        nbytes = piece.elements * tensor.item_bytes
        if tensor.alias is None and nbytes:
            if piece.offset < end:
                raise DecodeError(f"manifest: tensor {shortened(tensor.name)} overlaps another.")
            if piece.offset - end >= layout.chunk_bytes:
                raise DecodeError(
                    f"manifest: the chunk before tensor {shortened(tensor.name)} is empty."
                )
            end = piece.offset + nbytes
        if max(end, piece.offset) > layout.nbytes:
            raise DecodeError(
                f"manifest: tensor {shortened(tensor.name)} ends beyond the last byte."
            )
    if layout.nbytes - end >= layout.chunk_bytes:  # a rank's part is padded to whole chunks
        raise DecodeError(f"manifest: {layout.nbytes} bytes, but the tensors end at {end}.")
