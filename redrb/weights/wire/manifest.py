"""The manifest of a version: its tensors, the keys of its bytes, and their checksums.

The state of a version is the concatenation of all its tensors' bytes (little-endian, row-major),
each at a multiple of 64, cut into chunks of equal size. The manifest is a msgpack map:

    format        2
    kind          "full": the state itself, and perhaps a delta to it; "delta": a delta alone;
                  "lora": the state is an adapter's, for weights that the reader has
    version       int, the number in the id of its stream entry
    base          int, of an adapter: the version that it belongs to, 0 the reader's own weights
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
                  each chunk's encoded difference, 4 bytes big-endian each; blobs, list of
                  [token, first, count, checksums]: the differences of chunks first .. first +
                  count - 1 joined, cut into pieces of chunk_bytes in the keys delta:<token>:<n>
    spread        int, number of slots of a cluster that the keys are spread over, else 0
    lora          map: settings of an adapter's layers

Readers ignore keys that they do not know. Manifests come over the network: `manifest_codec` checks
all of a manifest before anything is allocated for it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import xxhash

from redrb.weights.wire.layout import Layout

Kind = Literal["full", "delta", "lora"]
FORMAT: Final = 2
MAX_VERSION: Final = 2**53 - 1
MAX_MANIFEST_BYTES: Final = 64 << 20
MAX_CHUNK_BYTES: Final = 64 << 20
MAX_CHUNKS: Final = 1 << 20
MAX_TENSORS: Final = 1 << 18
MAX_LISTS: Final = 4 << 20
MAX_DIMENSIONS: Final = 64
MAX_NAME_LENGTH: Final = 1024
MAX_SPREAD: Final = 1024
MAX_HASH: Final = 2**64 - 1


@dataclass(frozen=True, slots=True)
class WeightVersion:
    """A published version.

    Attributes:
        name: Name of the weights.
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
    kind: str
    base: int
    nbytes: int
    stored_bytes: int
    delta_bytes: int | None
    tensors: int
    created_s: float


@dataclass(frozen=True, slots=True)
class Source:
    """Consecutive chunks of a state, and the attempt whose keys hold them."""

    token: int
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Blob:
    """Encoded differences of consecutive chunks, joined; checksums of their pieces in Redis."""

    token: int
    first: int
    count: int
    checksums: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """The changes from the version before.

    Attributes:
        base: The version before.
        before: Hash of that version's checksums.
        sizes: Bytes of each chunk's encoded difference, 0 for unchanged chunks.
        blobs: Keys of the differences.
    """

    base: int
    before: int
    sizes: tuple[int, ...]
    blobs: tuple[Blob, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all differences."""
        return sum(self.sizes)

    def blob_bytes(self, blob: Blob) -> int:
        """Return the bytes of one blob."""
        return sum(self.sizes[blob.first : blob.first + blob.count])


@dataclass(frozen=True, slots=True)
class Manifest:
    """All that a reader needs to fetch a version and to check it.

    Attributes:
        layout: None for a delta, which has the layout of the version before.
        layout_id: Hash of the list of tensors.
        adapter: Settings of an adapter's layers; `redrb.weights.lora` checks them.
    """

    version: int
    kind: Kind
    names: int
    nbytes: int
    chunk_bytes: int
    layout_id: int
    layout: Layout | None
    checksums: tuple[int, ...]
    sources: tuple[Source, ...] = ()
    delta: Delta | None = None
    base: int = 0
    spread: int = 0
    adapter: Any = field(default=None)

    @property
    def state_hash(self) -> int:
        """Hash of the state, made of the checksums of its chunks."""
        return hash_of(self.checksums)

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


def hash_of(checksums: tuple[int, ...]) -> int:
    """Return the hash of a state, made of the checksums of its chunks."""
    return xxhash.xxh3_64_intdigest(pack_hashes(checksums))


def pack_hashes(numbers: tuple[int, ...]) -> bytes:
    """Return 64-bit hashes as a manifest stores them: big-endian, one after another."""
    return struct.pack(f">{len(numbers)}Q", *numbers)
