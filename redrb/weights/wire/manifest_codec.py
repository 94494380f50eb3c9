"""Manifests to msgpack and back; all of a manifest is checked before any of it is used."""

from __future__ import annotations

import math
import reprlib
import struct
from collections.abc import Mapping
from typing import Any

import msgpack
import xxhash

from redrb.errors import DecodeError
from redrb.unpacking import unpack
from redrb.weights.wire.layout import ALIGNMENT, ITEM_BYTES, Layout, TensorEntry
from redrb.weights.wire.manifest import (
    FORMAT,
    MAX_CHUNK_BYTES,
    MAX_CHUNKS,
    MAX_DIMENSIONS,
    MAX_HASH,
    MAX_LISTS,
    MAX_MANIFEST_BYTES,
    MAX_NAME_LENGTH,
    MAX_SPREAD,
    MAX_TENSORS,
    MAX_VERSION,
    Blob,
    Delta,
    Manifest,
    Source,
    pack_hashes,
)


def layout_hash(layout: Layout) -> int:
    """Return the hash of the names, dtypes, shapes and places of all tensors."""
    return xxhash.xxh3_64_intdigest(msgpack.packb(_listed(layout)))


def encode_manifest(manifest: Manifest) -> bytes:
    """Return a manifest as msgpack."""
    fields: dict[str, Any] = {
        "format": FORMAT,
        "kind": manifest.kind,
        "version": manifest.version,
        "names": manifest.names,
        "nbytes": manifest.nbytes,
        "chunk_bytes": manifest.chunk_bytes,
        "layout": manifest.layout_id,
        "checksums": pack_hashes(manifest.checksums),
        "sources": [[run.token, run.first, run.count] for run in manifest.sources],
        "spread": manifest.spread,
    }
    if manifest.layout is not None:
        fields["tensors"] = _listed(manifest.layout)
    if manifest.delta is not None:
        delta = manifest.delta
        fields["delta"] = {
            "base": delta.base,
            "before": delta.before,
            "sizes": struct.pack(f">{len(delta.sizes)}I", *delta.sizes),
            "blobs": [
                [blob.token, blob.first, blob.count, pack_hashes(blob.checksums)]
                for blob in delta.blobs
            ],
        }
    if manifest.kind == "lora":
        fields |= {"base": manifest.base, "lora": manifest.adapter}
    stored: bytes = msgpack.packb(fields)
    return stored


def decode_manifest(stored: bytes, layouts: Mapping[int, Layout] | None = None) -> Manifest:
    """Return the manifest in `stored` after checking all of it, or raise DecodeError."""
    if len(stored) > MAX_MANIFEST_BYTES:
        raise DecodeError(f"manifest: {len(stored)} bytes; the limit is {MAX_MANIFEST_BYTES}.")
    fields = unpack(stored, "manifest", containers=MAX_LISTS)
    if not isinstance(fields, dict):
        raise DecodeError("manifest: it is not a map.")
    kind = fields.get("kind")
    if fields.get("format") != FORMAT or kind not in ("full", "delta", "lora"):
        raise DecodeError(
            f"manifest: format {_shown(fields.get('format'))} and kind {_shown(kind)}; this "
            f"redrb reads format {FORMAT}. Install the publisher's version of redrb."
        )
    nbytes = _integer(fields, "nbytes", 0, MAX_VERSION)
    chunk_bytes = _integer(fields, "chunk_bytes", ALIGNMENT, MAX_CHUNK_BYTES)
    if chunk_bytes % ALIGNMENT:
        raise DecodeError(
            f"manifest: chunks of {chunk_bytes} bytes, which is not a multiple of {ALIGNMENT}."
        )
    chunks = -(-nbytes // chunk_bytes)
    if chunks > MAX_CHUNKS:
        raise DecodeError(f"manifest: {chunks} chunks; the limit is {MAX_CHUNKS}.")
    layout_id = _integer(fields, "layout", 0, MAX_HASH)
    layout = None
    if kind != "delta":
        layout = _layout(fields.get("tensors"), layout_id, nbytes, chunk_bytes, layouts or {})
    delta = None
    if kind == "delta" or (kind == "full" and "delta" in fields):
        delta = _delta(fields.get("delta"), chunks, nbytes, chunk_bytes)
    version = _integer(fields, "version", 1, MAX_VERSION)
    base = _integer(fields, "base", 0, MAX_VERSION) if kind == "lora" else 0
    if max(base, delta.base if delta else 0) >= version:
        raise DecodeError(f"manifest: version {version} is based on itself or on a later version.")
    return Manifest(
        version=version,
        kind=kind,
        names=_integer(fields, "names", 0, MAX_TENSORS),
        nbytes=nbytes,
        chunk_bytes=chunk_bytes,
        layout_id=layout_id,
        layout=layout,
        checksums=_checksums(fields.get("checksums"), chunks),
        sources=tuple(
            Source(*run)
            for run in _ranges(fields.get("sources"), 3, chunks * (kind != "delta"), "sources")
        ),
        delta=delta,
        base=base,
        spread=_integer(fields, "spread", 0, MAX_SPREAD),
        adapter=fields.get("lora") if kind == "lora" else None,
    )


def _listed(layout: Layout) -> list[dict[str, Any]]:
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


def _integer(fields: dict[str, Any], name: str, least: int, most: int) -> int:
    value = fields.get(name)
    if type(value) is not int or not least <= value <= most:
        raise DecodeError(f"manifest: {name} is {_shown(value)}, not an integer {least} to {most}.")
    return value


def _shown(value: object) -> str:
    return reprlib.repr(value)[:80]


def _layout(
    tensors: Any, layout_id: int, nbytes: int, chunk_bytes: int, layouts: Mapping[int, Layout]
) -> Layout:
    known = layouts.get(layout_id)
    if known is not None and (known.nbytes, known.chunk_bytes) == (nbytes, chunk_bytes):
        return known
    if not isinstance(tensors, list) or len(tensors) > MAX_TENSORS:
        raise DecodeError(f"manifest: tensors is not a list of at most {MAX_TENSORS}.")
    found: dict[str, TensorEntry] = {}
    for each in tensors:
        tensor = _tensor(each, found)
        found[tensor.name] = tensor
    layout = Layout(tuple(found.values()), nbytes, chunk_bytes)
    _check_places(layout)
    if layout_hash(layout) != layout_id:
        raise DecodeError("manifest: the hash of its list of tensors is wrong.")
    return layout


def _tensor(fields: object, before: Mapping[str, TensorEntry]) -> TensorEntry:
    """Return a tensor of the list, after checking all of it; `before` are those before it."""
    if not isinstance(fields, dict):
        raise DecodeError("manifest: an item of tensors is not a map.")
    name, dtype, alias = fields.get("name"), fields.get("dtype"), fields.get("alias")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_LENGTH:
        raise DecodeError(f"manifest: {_shown(name)} is not a tensor's name.")
    if name in before:
        raise DecodeError(f"manifest: tensor {_shown(name)} is listed twice.")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise DecodeError(f"manifest: tensor {_shown(name)} has the unknown dtype {_shown(dtype)}.")
    shape = fields.get("shape")
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS:
        raise DecodeError(f"manifest: tensor {_shown(name)} has no shape of up to 64 dimensions.")
    if not all(type(size) is int and 0 <= size <= MAX_VERSION for size in shape):
        raise DecodeError(f"manifest: tensor {_shown(name)} has the shape {_shown(shape)}.")
    # sizes beside a 0 count too, since strides are computed from them
    if math.prod(max(size, 1) for size in shape) * ITEM_BYTES[dtype] > MAX_VERSION:
        raise DecodeError(
            f"manifest: tensor {_shown(name)} has too large a shape: {_shown(shape)}."
        )
    offset = _integer(fields, "offset", 0, MAX_VERSION)
    tensor = TensorEntry(name, dtype, tuple(shape), offset, alias)
    if alias is None:
        return tensor
    owner = before.get(alias) if isinstance(alias, str) else None
    if owner is None or owner.alias is not None:
        raise DecodeError(f"manifest: {_shown(name)} is tied to a tensor that is not before it.")
    if (owner.dtype, owner.shape, owner.offset) != (dtype, tensor.shape, offset):
        raise DecodeError(f"manifest: {_shown(name)} differs from the tensor that it is tied to.")
    return tensor


def _check_places(layout: Layout) -> None:
    """Check that tensors do not overlap, leave no chunk empty, and end inside of the state."""
    end = 0
    for tensor in sorted(layout.tensors, key=lambda tensor: tensor.offset):
        name = _shown(tensor.name)
        if tensor.offset % ALIGNMENT:
            raise DecodeError(f"manifest: tensor {name} is not aligned.")
        if tensor.alias is None and tensor.nbytes:
            if tensor.offset < end:
                raise DecodeError(f"manifest: tensor {name} overlaps another.")
            if tensor.offset - end >= layout.chunk_bytes:
                raise DecodeError(f"manifest: the chunk before tensor {name} is empty.")
            end = tensor.offset + tensor.nbytes
        if max(end, tensor.offset) > layout.nbytes:
            raise DecodeError(f"manifest: tensor {name} ends beyond the last byte.")
    if layout.nbytes - end >= layout.chunk_bytes:
        raise DecodeError(f"manifest: {layout.nbytes} bytes, but the tensors end at {end}.")


def _checksums(value: object, chunks: int) -> tuple[int, ...]:
    if not isinstance(value, bytes) or len(value) != 8 * chunks:
        raise DecodeError(f"manifest: checksums are not 8 bytes for each of {chunks} chunks.")
    return struct.unpack(f">{chunks}Q", value)


def _ranges(value: object, fields: int, chunks: int, name: str) -> list[list[Any]]:
    """Return lists of `fields` items that begin with token, first, count and cover all chunks."""
    if not isinstance(value, list) or len(value) > MAX_CHUNKS:
        raise DecodeError(f"manifest: {name} is not a list.")
    next_chunk = 0
    for item in value:
        if not isinstance(item, list) or len(item) != fields:
            raise DecodeError(f"manifest: {name} has {_shown(item)}.")
        numbers = dict(zip(("token", "first", "count"), item, strict=False))
        _integer(numbers, "token", 1, MAX_VERSION)
        if _integer(numbers, "first", 0, chunks) != next_chunk:
            raise DecodeError(f"manifest: {name} leaves chunks out, or lists some twice.")
        next_chunk += _integer(numbers, "count", 0, chunks - next_chunk)
    if next_chunk != chunks:
        raise DecodeError(f"manifest: {name} has {next_chunk} of {chunks} chunks.")
    return value


def _delta(value: object, chunks: int, nbytes: int, chunk_bytes: int) -> Delta:
    if not isinstance(value, dict):
        raise DecodeError("manifest: delta is not a map.")
    packed = value.get("sizes")
    if not isinstance(packed, bytes) or len(packed) != 4 * chunks:
        raise DecodeError(f"manifest: sizes are not 4 bytes for each of {chunks} chunks.")
    sizes: tuple[int, ...] = struct.unpack(f">{chunks}I", packed)
    if sum(sizes) > nbytes:
        raise DecodeError(f"manifest: a delta of {sum(sizes)} bytes to a state of {nbytes}.")
    blobs = []
    for token, first, count, checksums in _ranges(value.get("blobs"), 4, chunks, "blobs"):
        pieces = -(-sum(sizes[first : first + count]) // chunk_bytes)
        blobs.append(Blob(token, first, count, _checksums(checksums, pieces)))
    return Delta(
        _integer(value, "base", 1, MAX_VERSION),
        _integer(value, "before", 0, MAX_HASH),
        sizes,
        tuple(blobs),
    )
