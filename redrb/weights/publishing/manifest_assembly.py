"""The manifest of a version that was staged."""

from __future__ import annotations

from typing import Any

from redrb.weights.publishing.staging import StagedVersion
from redrb.weights.wire.manifest import Blob, Delta, Kind, Manifest, hash_of
from redrb.weights.wire.tensor_list import layout_hash


def assemble_manifest(
    staged: StagedVersion,
    *,
    kind: Kind,
    base: int = 0,
    before: tuple[int, ...] = (),
    adapter: Any = None,
) -> Manifest:
    """Return the manifest of a staged version.

    Args:
        staged: The version.
        kind: Kind of the version.
        base: The version that a delta starts from, or that an adapter belongs to.
        before: Chunk checksums of the version that a delta starts from.
        adapter: Settings of an adapter's layers.
    """
    layout, delta = staged.layout, None
    if staged.sizes is not None:
        blob = Blob(staged.place.token, 0, len(staged.sizes), staged.pieces)
        delta = Delta(base, hash_of(before), staged.sizes, (blob,))
    return Manifest(
        version=staged.place.version,
        kind=kind,
        names=len(layout.tensors),
        nbytes=layout.nbytes,
        chunk_bytes=layout.chunk_bytes,
        layout_id=layout_hash(layout),
        layout=None if kind == "delta" else layout,
        checksums=staged.checksums,
        sources=staged.sources,
        delta=delta,
        base=base if kind == "lora" else 0,
        spread=staged.place.spread,
        adapter=adapter,
    )
