"""The manifest of a version: what it holds, where the bytes are, and their checksums.

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
                  bytes a tied one shares, at the same offset; of a tensor that was published in
                  shards pieces, a list of [start, shape, offset], in place of offset. Only with
                  kinds "full" and "lora": a delta's tensors are those of the version before
    checksums     bytes: xxh3_64 of each chunk of the state, 8 bytes big-endian
    sources       list of [token, first, count]: chunks first .. first + count - 1 are in the keys
                  chunk:<token>:<index>; some may be those of an earlier version
    delta         map: base, the version before; before, xxh3_64 of its checksums; sizes, bytes of
                  each chunk's encoded difference, 4 bytes big-endian each; blobs, list of
                  [token, first, count, checksums]: the differences of chunks first .. first +
                  count - 1 joined, cut into pieces of chunk_bytes in the keys delta:<token>:<n>
    spread        int, number of slots of a cluster that the keys are spread over, else 0
    lora          map: settings of an adapter's layers

Readers ignore keys that they do not know. What is read here came over the network: nothing is
allocated, and nothing believed, before all of it was checked.
"""

from __future__ import annotations

import math
import reprlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgpack
import xxhash

from redrb.errors import DecodeError
from redrb.weights.wire.layout import ALIGNMENT, ITEM_BYTES, Layout, Piece, TensorEntry, tile

Kind = Literal["full", "delta", "lora"]

FORMAT: Final = 2

MAX_VERSION: Final = 2**53 - 1
MAX_MANIFEST_BYTES: Final = 64 << 20
MAX_CHUNK_BYTES: Final = 64 << 20
MAX_CHUNKS: Final = 1 << 20
MAX_TENSORS: Final = 1 << 18
MAX_PIECES: Final = 1 << 20
MAX_LISTS: Final = 4 << 20
MAX_DIMENSIONS: Final = 64
MAX_NAME_LENGTH: Final = 1024
MAX_SPREAD: Final = 1024
_HASH: Final = 2**64 - 1


@dataclass(frozen=True, slots=True)
class WeightVersion:
    """A published version.

    Attributes:
        name: Name of the weights.
        version: Its number, >= 1; each is larger than the one before.
        kind: "full": all tensors, complete; "delta": what changed since the version before;
            "lora": an adapter.
        base: Of a delta the version before, of an adapter the one that it belongs to; else 0.
        nbytes: Bytes of all tensors.
        stored_bytes: Bytes in Redis, without the manifest.
        delta_bytes: What a reader of the version before fetches, where that is enough.
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
    """Encoded differences of consecutive chunks, joined, and checksums of its pieces in Redis."""

    token: int
    first: int
    count: int
    checksums: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """What leads from the version before to this one.

    Attributes:
        base: The version before.
        before: Hash of its checksums.
        sizes: Encoded bytes of each chunk's difference; 0: it did not change.
        blobs: Where they are.
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
        layout: None in a delta: it is that of the version before.
        layout_id: Hash of the list of tensors.
        adapter: Settings of an adapter's layers, as they came: `redrb.weights.lora` checks them.
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
        """Hash of the checksums of the state."""
        return hash_of(self.checksums)

    def describe(self, name: str, created_s: float) -> WeightVersion:
        """Return what users see of this version."""
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
    return xxhash.xxh3_64_intdigest(_packed(checksums))


def layout_hash(layout: Layout) -> int:
    """Return the hash of the names, dtypes, shapes and places of tensors."""
    return xxhash.xxh3_64_intdigest(msgpack.packb(list_tensors(layout)))


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the manifest as stored."""
    fields: dict[str, Any] = {
        "format": FORMAT,
        "kind": manifest.kind,
        "version": manifest.version,
        "names": manifest.names,
        "nbytes": manifest.nbytes,
        "chunk_bytes": manifest.chunk_bytes,
        "layout": manifest.layout_id,
        "checksums": _packed(manifest.checksums),
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
                [blob.token, blob.first, blob.count, _packed(blob.checksums)]
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
        layouts: By their hashes, such as were decoded before: the same is not decoded again.

    Raises:
        DecodeError: It is damaged, hostile, or of a later format.
    """
    if len(stored) > MAX_MANIFEST_BYTES:
        raise DecodeError(f"a manifest of {len(stored)} bytes: at most {MAX_MANIFEST_BYTES} are.")
    try:
        fields = _unpacked(stored)
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise DecodeError(f"a manifest that is no msgpack: {error!s:.80}") from error
    if not isinstance(fields, dict):
        raise DecodeError("a manifest that is no map.")
    kind = fields.get("kind")
    if fields.get("format") != FORMAT or kind not in ("full", "delta", "lora"):
        raise DecodeError(
            f"a manifest of format {_short(fields.get('format'))} and kind {_short(kind)}; this "
            f"redrb reads format {FORMAT}: install one as new as the publisher's."
        )
    nbytes = _integer(fields, "nbytes", 0, MAX_VERSION)
    chunk_bytes = _integer(fields, "chunk_bytes", ALIGNMENT, MAX_CHUNK_BYTES)
    if chunk_bytes % ALIGNMENT:
        raise DecodeError(f"manifest: chunks of {chunk_bytes} bytes, no multiple of {ALIGNMENT}.")
    chunks = -(-nbytes // chunk_bytes)
    if chunks > MAX_CHUNKS:
        raise DecodeError(f"manifest: {chunks} chunks, at most {MAX_CHUNKS} are.")
    layout_id = _integer(fields, "layout", 0, _HASH)
    layout = None
    if kind != "delta":
        layout = (layouts or {}).get(layout_id)
        if layout is not None and (layout.nbytes, layout.chunk_bytes) != (nbytes, chunk_bytes):
            layout = None
    if kind != "delta" and layout is None:
        layout = Layout(read_tensors(fields.get("tensors")), nbytes, chunk_bytes)
        _check_places(layout)
        if layout_hash(layout) != layout_id:
            raise DecodeError("manifest: its list of tensors has another hash than it says.")
    delta = None
    if kind == "delta" or (kind == "full" and "delta" in fields):
        delta = _delta(fields.get("delta"), chunks, nbytes, chunk_bytes)
    version = _integer(fields, "version", 1, MAX_VERSION)
    base = _integer(fields, "base", 0, MAX_VERSION) if kind == "lora" else 0
    if max(base, delta.base if delta else 0) >= version:
        raise DecodeError(f"manifest: version {version} stands on a later one.")
    sources = _sources(fields.get("sources"), chunks if kind != "delta" else 0)
    return Manifest(
        version=version,
        kind=kind,
        names=_integer(fields, "names", 0, MAX_TENSORS),
        nbytes=nbytes,
        chunk_bytes=chunk_bytes,
        layout_id=layout_id,
        layout=layout,
        checksums=_checksums(fields.get("checksums"), chunks),
        sources=sources,
        delta=delta,
        base=base,
        spread=_integer(fields, "spread", 0, MAX_SPREAD),
        adapter=fields.get("lora") if kind == "lora" else None,
    )


def _unpacked(stored: bytes) -> Any:
    """Return what msgpack has: bounded, since a byte of it may be a list of 75 bytes."""
    room = [MAX_LISTS]

    def counted(found: Any) -> Any:
        room[0] -= 1
        if not room[0]:
            raise ValueError(f"more than {MAX_LISTS} lists and maps")
        return found

    return msgpack.unpackb(stored, list_hook=counted, object_hook=counted)


def _short(value: object) -> str:
    """Return what `value` looks like, however large it is."""
    return reprlib.repr(value)[:80]


def _packed(numbers: tuple[int, ...]) -> bytes:
    return struct.pack(f">{len(numbers)}Q", *numbers)


def list_tensors(layout: Layout) -> list[dict[str, Any]]:
    """Return the list of tensors as it is stored."""
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


def _integer(fields: dict[str, Any], name: str, least: int, most: int) -> int:
    value = fields.get(name)
    if type(value) is not int or not least <= value <= most:
        raise DecodeError(f"manifest: {name} is {_short(value)}, not an integer {least} to {most}.")
    return value


def read_tensors(value: object, *, whole: bool = True) -> tuple[TensorEntry, ...]:
    """Return a stored list of tensors; `whole`: their pieces make them up.

    Raises:
        DecodeError: It is damaged.
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
            raise DecodeError(f"manifest: tensor {_short(tensor.name)} is listed twice.")
        if tensor.alias is not None:
            _check_alias(tensor, tensors.get(tensor.alias))
        tensors[tensor.name] = tensor
    return tuple(tensors.values())


def _tensor(fields: object, *, whole: bool) -> TensorEntry:
    if not isinstance(fields, dict):
        raise DecodeError("manifest: an item of tensors is not a map.")
    name, dtype, alias = fields.get("name"), fields.get("dtype"), fields.get("alias")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_LENGTH:
        raise DecodeError(f"manifest: {_short(name)} is not a tensor's name.")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise DecodeError(f"manifest: tensor {_short(name)} has the unknown dtype {_short(dtype)}.")
    if not (alias is None or isinstance(alias, str)):
        raise DecodeError(f"manifest: tensor {_short(name)} has the alias {_short(alias)}.")
    shape = _shape(name, fields.get("shape"), ITEM_BYTES[dtype])
    if "pieces" in fields:
        pieces = _pieces(name, fields["pieces"], shape, whole=whole)
    else:
        offset = _integer(fields, "offset", 0, MAX_VERSION)
        pieces = (Piece((0,) * len(shape), shape, offset),)
    return TensorEntry(name, dtype, shape, pieces, alias)


def _pieces(name: str, value: object, shape: tuple[int, ...], *, whole: bool) -> tuple[Piece, ...]:
    if not isinstance(value, list) or not 0 < len(value) <= MAX_PIECES:
        raise DecodeError(f"manifest: tensor {_short(name)} has no list of pieces.")
    pieces = []
    for item in value:
        if not isinstance(item, list) or len(item) != 3:
            raise DecodeError(f"manifest: a piece of tensor {_short(name)} is {_short(item)}.")
        start, size = (_sizes(name, part, len(shape)) for part in item[:2])
        if any(at + most > whole for at, most, whole in zip(start, size, shape, strict=True)):
            raise DecodeError(f"manifest: a piece of tensor {_short(name)} is outside of it.")
        pieces.append(Piece(start, size, _integer({"offset": item[2]}, "offset", 0, MAX_VERSION)))
    if whole and not tile(shape, pieces):
        raise DecodeError(f"manifest: the pieces of tensor {_short(name)} do not make it up.")
    return tuple(pieces)


def _sizes(name: str, value: object, dimensions: int | None = None) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > MAX_DIMENSIONS:
        raise DecodeError(f"manifest: tensor {_short(name)} has no shape of up to 64 dimensions.")
    if not all(type(size) is int and 0 <= size <= MAX_VERSION for size in value):
        raise DecodeError(f"manifest: tensor {_short(name)} has the shape {_short(value)}.")
    if dimensions is not None and len(value) != dimensions:
        raise DecodeError(f"manifest: a piece of tensor {_short(name)} has {_short(value)}.")
    return tuple(value)


def _shape(name: str, value: object, item_bytes: int) -> tuple[int, ...]:
    sizes = _sizes(name, value)
    # sizes beside a 0 count too: strides are made of them
    if math.prod(max(size, 1) for size in sizes) * item_bytes > MAX_VERSION:
        raise DecodeError(
            f"manifest: tensor {_short(name)} has too large a shape: {_short(sizes)}."
        )
    return sizes


def _check_alias(tensor: TensorEntry, owner: TensorEntry | None) -> None:
    if owner is None or owner.alias is not None:
        raise DecodeError(f"manifest: {_short(tensor.name)} is tied to no tensor before it.")
    if (owner.dtype, owner.shape, owner.pieces) != (tensor.dtype, tensor.shape, tensor.pieces):
        raise DecodeError(f"manifest: {_short(tensor.name)} differs from what it is tied to.")


def _check_places(layout: Layout) -> None:
    """Every byte belongs to one tensor at most, and lies inside."""
    end = 0
    pieces = ((piece, tensor) for tensor in layout.tensors for piece in tensor.pieces)
    for piece, tensor in sorted(pieces, key=lambda pair: pair[0].offset):
        if piece.offset % ALIGNMENT:
            raise DecodeError(f"manifest: tensor {_short(tensor.name)} is not aligned.")
        nbytes = piece.elements * tensor.item_bytes
        if tensor.alias is None and nbytes:
            if piece.offset < end:
                raise DecodeError(f"manifest: tensor {_short(tensor.name)} overlaps another.")
            if piece.offset - end >= layout.chunk_bytes:
                raise DecodeError(f"manifest: nothing is before tensor {_short(tensor.name)}.")
            end = piece.offset + nbytes
        if max(end, piece.offset) > layout.nbytes:
            raise DecodeError(f"manifest: tensor {_short(tensor.name)} ends beyond the last byte.")
    if layout.nbytes - end >= layout.chunk_bytes:  # each rank's part fills its last chunk
        raise DecodeError(f"manifest: {layout.nbytes} bytes, but the tensors end at {end}.")


def _checksums(value: object, chunks: int) -> tuple[int, ...]:
    if not isinstance(value, bytes) or len(value) != 8 * chunks:
        raise DecodeError(f"manifest: checksums are not 8 bytes for each of {chunks} chunks.")
    return struct.unpack(f">{chunks}Q", value)


def _ranges(value: object, fields: int, chunks: int, what: str) -> list[list[Any]]:
    """Return lists of `fields` items that start with token, first, count and cover all chunks."""
    if not isinstance(value, list) or len(value) > MAX_CHUNKS:
        raise DecodeError(f"manifest: {what} is no list.")
    next_chunk = 0
    for item in value:
        if not isinstance(item, list) or len(item) != fields:
            raise DecodeError(f"manifest: {what} has {_short(item)}.")
        numbers = dict(zip(("token", "first", "count"), item, strict=False))
        _integer(numbers, "token", 1, MAX_VERSION)
        if _integer(numbers, "first", 0, chunks) != next_chunk:
            raise DecodeError(f"manifest: {what} leaves chunks out, or has some twice.")
        next_chunk += _integer(numbers, "count", 0, chunks - next_chunk)
    if next_chunk != chunks:
        raise DecodeError(f"manifest: {what} has {next_chunk} of {chunks} chunks.")
    return value


def _sources(value: object, chunks: int) -> tuple[Source, ...]:
    return tuple(Source(*item) for item in _ranges(value, 3, chunks, "sources"))


def _delta(value: object, chunks: int, nbytes: int, chunk_bytes: int) -> Delta:
    if not isinstance(value, dict):
        raise DecodeError("manifest: delta is no map.")
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
        _integer(value, "before", 0, _HASH),
        sizes,
        tuple(blobs),
    )
