"""Assembles the manifest of one version from the parts that ranks have staged."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from redrb.errors import DecodeError, EncodeError
from redrb.weights.publishing.staging import StagedPart
from redrb.weights.wire.layout import Layout, Piece, TensorEntry
from redrb.weights.wire.manifest import Blob, Delta, Kind, Manifest, hash_of
from redrb.weights.wire.manifest_codec import decode_manifest, encode_manifest
from redrb.weights.wire.tensor_list import layout_hash


def assemble_manifest(
    parts: Sequence[StagedPart],
    *,
    kind: Kind,
    base: int = 0,
    before: tuple[int, ...] = (),
    adapter: Any = None,
) -> Manifest:
    """Return the manifest of the version that the staged parts make up.

    Args:
        parts: The staged part of each rank, by rank; either all of them have a delta or none.
        kind: Kind of the version.
        base: The version that a delta starts from, or that an adapter belongs to.
        before: Chunk checksums of the version that a delta starts from.
        adapter: Settings of an adapter's layers.

    Raises:
        EncodeError: The parts do not make up whole tensors.
    """
    layout = _joined_layout(parts)
    blobs = []
    sizes: list[int] = []
    for part in parts:
        if part.sizes is not None:
            blobs.append(Blob(part.place.token, part.place.first, len(part.sizes), part.pieces))
            sizes += part.sizes
    delta = Delta(base, hash_of(before), tuple(sizes), tuple(blobs)) if blobs else None
    manifest = Manifest(
        version=parts[0].place.version,
        kind=kind,
        names=len(layout.tensors),
        nbytes=layout.nbytes,
        chunk_bytes=layout.chunk_bytes,
        layout_id=layout_hash(layout),
        layout=None if kind == "delta" else layout,
        checksums=tuple(checksum for part in parts for checksum in part.checksums),
        sources=tuple(run for part in parts for run in part.sources),
        delta=delta,
        base=base if kind == "lora" else 0,
        spread=parts[0].place.spread,
        adapter=adapter,
    )
    if len(parts) > 1:
        try:
            decode_manifest(encode_manifest(manifest))
        except (DecodeError, TypeError, ValueError, struct.error) as error:
            raise EncodeError(f"the ranks' shards do not make up a version: {error}") from error
    return manifest


def _joined_layout(parts: Sequence[StagedPart]) -> Layout:
    if len(parts) == 1:
        return parts[0].layout
    tensors: dict[str, TensorEntry] = {}
    nbytes = 0
    for rank, part in enumerate(parts):
        shift = part.place.first * part.layout.chunk_bytes
        nbytes = max(nbytes, shift + part.layout.nbytes)
        for entry in part.layout.tensors:
            moved = replace(entry, pieces=tuple(_shifted(piece, shift) for piece in entry.pieces))
            known = tensors.get(entry.name)
            tensors[entry.name] = moved if known is None else _with_pieces(known, moved, rank)
    return Layout(tuple(tensors.values()), nbytes, parts[0].layout.chunk_bytes)


def _with_pieces(known: TensorEntry, more: TensorEntry, rank: int) -> TensorEntry:
    if (known.dtype, known.shape) != (more.dtype, more.shape):
        raise EncodeError(
            f"{more.name!r} is {known} on an earlier rank, but {more} on rank {rank}."
        )
    boxes = [(piece.start, piece.shape) for piece in known.pieces]
    if any((piece.start, piece.shape) in boxes for piece in more.pieces):
        raise EncodeError(
            f"{more.name!r} is the same on rank {rank} and an earlier rank: publish it on one of "
            "them."
        )
    return replace(known, pieces=known.pieces + more.pieces)


def _shifted(piece: Piece, shift: int) -> Piece:
    return replace(piece, offset=piece.offset + shift)
