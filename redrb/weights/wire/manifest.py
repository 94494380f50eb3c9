"""The manifest of a version: its tensors, the keys of its bytes, and their checksums.

The state of a version is the concatenation of all its tensors' bytes (little-endian, row-major),
each at a multiple of 64, cut into chunks of equal size. The manifest is a msgpack map:

    format        3
    kind          "full": the state itself, and perhaps a delta to it; "delta": a delta alone;
                  "lora": the state is an adapter's, for weights that the reader has
    version       int, the number in the id of its stream entry
    base          int, of an adapter: the version that it belongs to; missing: the reader's own
    names         int, number of tensors, tied ones counted by each name
    nbytes        int, bytes of the state
    chunk_bytes   int, bytes of every chunk but the last, a multiple of 64
    layout        int, xxh3_64 of the packed list of tensors
    tensors       list of maps: name, dtype, shape, offset; alias names the earlier tensor whose
                  bytes a tied one shares, at the same offset. Only with kinds "full" and "lora": a
                  delta's tensors are those of the version before
    checksums     bytes: xxh3_64 of each chunk of the state, 8 bytes big-endian
    sources       list of [token, first, count]: chunks first .. first + count - 1 are in the keys
                  chunk:<token>:<index>; some may be those of an earlier version
    delta         map: base, the version before; before, xxh3_64 of its checksums; sizes, bytes of
                  each chunk's encoded difference, 4 bytes big-endian each; token: all differences
                  joined, cut into pieces of chunk_bytes, are in the keys delta:<token>:<n>;
                  checksums, of these pieces
    spread        int, number of slots of a cluster that the keys are spread over, else 0
    lora          map: layer -> its settings: list of r, lora_alpha, lora_dropout, fan_in_fan_out,
                  use_rslora

Readers ignore keys that they do not know. Manifests come over the network: all of a manifest is
checked before anything is allocated for what it describes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Final, Literal

import msgspec
import xxhash
from msgspec import Meta

from redrb.checks import MOST
from redrb.errors import DecodeError
from redrb.weights.wire.layout import ALIGNMENT, ITEM_BYTES, Layout, TensorEntry, Whole
from redrb.weights.wire.lora_config import LoraConfig

Kind = Literal["full", "delta", "lora"]
FORMAT: Final = 3
MAX_MANIFEST_BYTES: Final = 64 << 20
MAX_CHUNK_BYTES: Final = 64 << 20
MAX_CHUNKS: Final = 1 << 20
MAX_TENSORS: Final = 1 << 18
MAX_SPREAD: Final = 1024

Positive = Annotated[int, Meta(ge=1, le=MOST)]
Index = Annotated[int, Meta(ge=0, le=MAX_CHUNKS)]
Hash = Annotated[int, Meta(ge=0)]


@dataclass(frozen=True, slots=True)
class WeightVersion:
    """A published version.

    Attributes:
        version: Its number, >= 1; each is larger than the one before.
        kind: "full": all tensors; "delta": the changes since the version before; "lora": an
            adapter.
        base: Of a delta, the version before; of an adapter, the version that it belongs to; else 0.
        nbytes: Bytes of all tensors.
        stored_bytes: Bytes in Redis, without the manifest.
        delta_bytes: Bytes that a reader of the version before fetches; None if there is no delta.
        tensors: Number of tensors, tied ones counted by each name.
        created_s: Seconds since the epoch at the commit, by the server's clock.
    """

    name: str
    version: int
    kind: Kind
    base: Whole
    nbytes: Whole
    stored_bytes: Whole
    delta_bytes: Whole | None
    tensors: Whole
    created_s: float


class ChunkSource(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False
):
    """Consecutive chunks of a state, and the attempt whose keys hold them."""

    token: Positive
    first: Index
    count: Index


class Delta(msgspec.Struct, frozen=True):
    """The changes from the version before.

    Attributes:
        base: The version before.
        before: Hash of that version's checksums.
        sizes: Bytes of each chunk's encoded difference, 0 for unchanged chunks: 4 bytes big-endian.
        token: The attempt whose keys hold the differences, joined and cut into pieces.
        checksums: Of the pieces, packed as `pack_hashes` does.
    """

    base: Positive
    before: Hash
    sizes: bytes
    token: Positive
    checksums: bytes

    @property
    def chunk_sizes(self) -> tuple[int, ...]:
        """Bytes of each chunk's difference."""
        return struct.unpack(f">{len(self.sizes) // 4}I", self.sizes)

    @property
    def nbytes(self) -> int:
        """Bytes of all differences."""
        return sum(self.chunk_sizes)


class Manifest(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    tag_field="format",
    tag=FORMAT,
):
    """All that a reader needs to fetch a version and to check it.

    Attributes:
        layout_id: Hash of the list of tensors.
        checksums: Packed, as `pack_hashes` does.
        tensors: None for a delta, which has the tensors of the version before.
        adapter: Settings of an adapter's layers.
    """

    kind: Kind
    version: Positive
    names: Annotated[int, Meta(ge=0, le=MAX_TENSORS)]
    nbytes: Whole
    chunk_bytes: Annotated[int, Meta(ge=ALIGNMENT, le=MAX_CHUNK_BYTES, multiple_of=ALIGNMENT)]
    layout_id: Hash = msgspec.field(name="layout")
    checksums: bytes
    sources: Annotated[tuple[ChunkSource, ...], Meta(max_length=MAX_CHUNKS)]
    spread: Annotated[int, Meta(ge=0, le=MAX_SPREAD)]
    tensors: Annotated[tuple[TensorEntry, ...], Meta(max_length=MAX_TENSORS)] | None = None
    delta: Delta | None = None
    base: Whole = 0
    adapter: Annotated[dict[str, LoraConfig], Meta(max_length=MAX_TENSORS)] | None = msgspec.field(
        default=None, name="lora"
    )

    @property
    def layout(self) -> Layout | None:
        """Places of the tensors; None for a delta."""
        if self.tensors is None:
            return None
        return Layout(self.tensors, self.nbytes, self.chunk_bytes)

    @property
    def state_hash(self) -> int:
        """Hash of the state, made of the checksums of its chunks."""
        return xxhash.xxh3_64_intdigest(self.checksums)

    def checksum(self, index: int) -> int:
        """Return the checksum of a chunk of the state."""
        return hash_at(self.checksums, index)

    def describe(self, name: str, created_s: float) -> WeightVersion:
        """Return the version as users see it."""
        delta_bytes = None if self.delta is None else self.delta.nbytes
        whole = 0 if self.kind == "delta" else self.nbytes
        base = self.delta.base if self.kind == "delta" and self.delta is not None else self.base
        return WeightVersion(
            name,
            self.version,
            self.kind,
            base,
            self.nbytes,
            whole + (delta_bytes or 0),
            delta_bytes,
            self.names,
            created_s,
        )


_DECODER: Final = msgspec.msgpack.Decoder(Manifest)


def decode_manifest(stored: bytes) -> Manifest:
    """Return the manifest in `stored` after checking all of it, or raise DecodeError."""
    if len(stored) > MAX_MANIFEST_BYTES:
        raise DecodeError(f"manifest: {len(stored)} bytes; the limit is {MAX_MANIFEST_BYTES}.")
    try:
        manifest = _DECODER.decode(stored)
        _check(manifest)
    except (ValueError, RecursionError) as error:
        raise DecodeError(
            f"manifest: {error}. It is damaged, or of another version of redrb: install the "
            "publisher's."
        ) from error
    return manifest


def pack_hashes(numbers: Iterable[int]) -> bytes:
    """Return 64-bit hashes as a manifest stores them: big-endian, one after another."""
    found = tuple(numbers)
    return struct.pack(f">{len(found)}Q", *found)


def hash_at(hashes: bytes, index: int) -> int:
    """Return one of the hashes that `pack_hashes` has packed."""
    return int.from_bytes(hashes[8 * index : 8 * index + 8])


def _check(manifest: Manifest) -> None:
    """Check what the types of the fields do not say, or raise ValueError."""
    kind, layout, delta = manifest.kind, manifest.layout, manifest.delta
    chunks = -(-manifest.nbytes // manifest.chunk_bytes)
    if chunks > MAX_CHUNKS:
        raise ValueError(f"{chunks} chunks; the limit is {MAX_CHUNKS}")
    parts = (layout is not None, delta is not None, manifest.adapter is not None)
    if parts not in _PARTS[kind] or (manifest.base and kind != "lora"):
        raise ValueError(f"its fields are not those of kind {kind!r}")
    if max(manifest.base, delta.base if delta is not None else 0) >= manifest.version:
        raise ValueError(f"version {manifest.version} is based on itself or on a later version")
    _check_hashes("checksums", manifest.checksums, chunks)
    _check_sources(manifest.sources, 0 if kind == "delta" else chunks)
    if delta is not None:
        if len(delta.sizes) != 4 * chunks:
            raise ValueError(f"sizes are not 4 bytes for each of {chunks} chunks")
        if delta.nbytes > manifest.nbytes:
            raise ValueError(f"a delta of {delta.nbytes} bytes to a state of {manifest.nbytes}")
        pieces = -(-delta.nbytes // manifest.chunk_bytes)
        _check_hashes("checksums of the delta", delta.checksums, pieces)
    if layout is not None:
        _check_tensors(layout)
        _check_places(layout)
        if layout.id != manifest.layout_id:
            raise ValueError("the hash of its list of tensors is wrong")


_PARTS: Final = {
    "full": ((True, False, False), (True, True, False)),
    "delta": ((False, True, False),),
    "lora": ((True, False, True),),
}
"""By kind: whether there are tensors, a delta, and settings of an adapter."""


def _check_hashes(name: str, hashes: bytes, count: int) -> None:
    if len(hashes) != 8 * count:
        raise ValueError(f"{name} are not {count} times 8 bytes")


def _check_sources(runs: Sequence[ChunkSource], chunks: int) -> None:
    listed = 0
    for run in runs:
        if run.first != listed:
            raise ValueError("sources leave chunks out, or list some twice")
        listed += run.count
    if listed != chunks:
        raise ValueError(f"sources have {listed} of {chunks} chunks")


def _check_tensors(layout: Layout) -> None:
    """Check each tensor by itself, and that it equals the one before it that it is tied to."""
    found: dict[str, TensorEntry] = {}
    for tensor in layout.tensors:
        if tensor.name in found:
            raise ValueError(f"tensor {tensor.name!r:.80} is listed twice")
        if tensor.dtype not in ITEM_BYTES:
            raise ValueError(f"tensor {tensor.name!r:.80} has the dtype {tensor.dtype!r:.80}")
        # sizes beside a 0 count too, since strides are computed from them
        if math.prod(max(size, 1) for size in tensor.shape) * tensor.item_bytes > MOST:
            raise ValueError(f"tensor {tensor.name!r:.80} has too large a shape")
        if tensor.alias is not None:
            owner = found.get(tensor.alias)
            tied = (tensor.dtype, tensor.shape, tensor.offset, None)
            if owner is None or (owner.dtype, owner.shape, owner.offset, owner.alias) != tied:
                raise ValueError(f"{tensor.name!r:.80} is tied to no tensor like it before it")
        found[tensor.name] = tensor


def _check_places(layout: Layout) -> None:
    """Check that tensors do not overlap, leave no chunk empty, and end inside of the state."""
    end = 0
    for tensor in sorted(layout.tensors, key=lambda tensor: tensor.offset):
        if tensor.offset % ALIGNMENT:
            raise ValueError(f"tensor {tensor.name!r:.80} is not aligned")
        if tensor.alias is None and tensor.nbytes:
            if tensor.offset < end:
                raise ValueError(f"tensor {tensor.name!r:.80} overlaps another")
            if tensor.offset - end >= layout.chunk_bytes:
                raise ValueError(f"the chunk before tensor {tensor.name!r:.80} is empty")
            end = tensor.offset + tensor.nbytes
        if max(end, tensor.offset) > layout.nbytes:
            raise ValueError(f"tensor {tensor.name!r:.80} ends beyond the last byte")
    if layout.nbytes - end >= layout.chunk_bytes:
        raise ValueError(f"{layout.nbytes} bytes, but the tensors end at {end}")
