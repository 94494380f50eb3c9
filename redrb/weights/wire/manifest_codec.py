"""Manifests to msgpack and back; all of a manifest is checked before any of it is used."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import msgpack

from redrb.errors import DecodeError
from redrb.unpacking import unpack
from redrb.weights.wire.field_checks import integer_field, shortened
from redrb.weights.wire.layout import ALIGNMENT, Layout
from redrb.weights.wire.manifest import (
    FORMAT,
    MAX_CHUNK_BYTES,
    MAX_CHUNKS,
    MAX_HASH,
    MAX_LISTS,
    MAX_MANIFEST_BYTES,
    MAX_SPREAD,
    MAX_TENSORS,
    MAX_VERSION,
    Blob,
    Delta,
    Manifest,
    Source,
    pack_hashes,
)
from redrb.weights.wire.tensor_list import check_places, layout_hash, list_tensors, read_tensors


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
        fields["tensors"] = list_tensors(manifest.layout)
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
    """Return the manifest in `stored` after checking all of it.

    Args:
        stored: From Redis.
        layouts: Layouts that were decoded before, by hash; they are not decoded again.

    Raises:
        DecodeError: The manifest is damaged, hostile, or of another format.
    """
    fields = _fields(stored)
    kind = fields["kind"]
    nbytes, chunk_bytes = _sizes(fields)
    chunks = -(-nbytes // chunk_bytes)
    if chunks > MAX_CHUNKS:
        raise DecodeError(f"manifest: {chunks} chunks; the limit is {MAX_CHUNKS}.")
    layout_id = integer_field(fields, "layout", 0, MAX_HASH)
    layout = None
    if kind != "delta":
        layout = _layout(fields.get("tensors"), layout_id, nbytes, chunk_bytes, layouts or {})
    delta = None
    if kind == "delta" or (kind == "full" and "delta" in fields):
        delta = _delta(fields.get("delta"), chunks, nbytes, chunk_bytes)
    version = integer_field(fields, "version", 1, MAX_VERSION)
    base = integer_field(fields, "base", 0, MAX_VERSION) if kind == "lora" else 0
    if max(base, delta.base if delta else 0) >= version:
        raise DecodeError(f"manifest: version {version} is based on itself or on a later version.")
    return Manifest(
        version=version,
        kind=kind,
        names=integer_field(fields, "names", 0, MAX_TENSORS),
        nbytes=nbytes,
        chunk_bytes=chunk_bytes,
        layout_id=layout_id,
        layout=layout,
        checksums=_checksums(fields.get("checksums"), chunks),
        sources=_sources(fields.get("sources"), chunks if kind != "delta" else 0),
        delta=delta,
        base=base,
        spread=integer_field(fields, "spread", 0, MAX_SPREAD),
        adapter=fields.get("lora") if kind == "lora" else None,
    )


def _fields(stored: bytes) -> dict[str, Any]:
    """Return a manifest's map; its format and kind are checked."""
    if len(stored) > MAX_MANIFEST_BYTES:
        raise DecodeError(f"manifest: {len(stored)} bytes; the limit is {MAX_MANIFEST_BYTES}.")
    fields = unpack(stored, "manifest", containers=MAX_LISTS)
    if not isinstance(fields, dict):
        raise DecodeError("manifest: it is not a map.")
    kind = fields.get("kind")
    if fields.get("format") != FORMAT or kind not in ("full", "delta", "lora"):
        raise DecodeError(
            f"manifest: format {shortened(fields.get('format'))} and kind {shortened(kind)}; this "
            f"redrb reads format {FORMAT}. Install the publisher's version of redrb."
        )
    return fields


def _sizes(fields: dict[str, Any]) -> tuple[int, int]:
    """Return the bytes of the state and of a chunk."""
    nbytes = integer_field(fields, "nbytes", 0, MAX_VERSION)
    chunk_bytes = integer_field(fields, "chunk_bytes", ALIGNMENT, MAX_CHUNK_BYTES)
    if chunk_bytes % ALIGNMENT:
        raise DecodeError(
            f"manifest: chunks of {chunk_bytes} bytes, which is not a multiple of {ALIGNMENT}."
        )
    return nbytes, chunk_bytes


def _layout(
    tensors: Any, layout_id: int, nbytes: int, chunk_bytes: int, layouts: Mapping[int, Layout]
) -> Layout:
    known = layouts.get(layout_id)
    if known is not None and (known.nbytes, known.chunk_bytes) == (nbytes, chunk_bytes):
        return known
    layout = Layout(read_tensors(tensors), nbytes, chunk_bytes)
    check_places(layout)
    if layout_hash(layout) != layout_id:
        raise DecodeError("manifest: the hash of its list of tensors is wrong.")
    return layout


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
            raise DecodeError(f"manifest: {name} has {shortened(item)}.")
        numbers = dict(zip(("token", "first", "count"), item, strict=False))
        integer_field(numbers, "token", 1, MAX_VERSION)
        if integer_field(numbers, "first", 0, chunks) != next_chunk:
            raise DecodeError(f"manifest: {name} leaves chunks out, or lists some twice.")
        next_chunk += integer_field(numbers, "count", 0, chunks - next_chunk)
    if next_chunk != chunks:
        raise DecodeError(f"manifest: {name} has {next_chunk} of {chunks} chunks.")
    return value


def _sources(value: object, chunks: int) -> tuple[Source, ...]:
    return tuple(Source(*item) for item in _ranges(value, 3, chunks, "sources"))


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
        integer_field(value, "base", 1, MAX_VERSION),
        integer_field(value, "before", 0, MAX_HASH),
        sizes,
        tuple(blobs),
    )
