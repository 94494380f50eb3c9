"""The manifest of a version: which tensors it holds, where their bytes are, and their checksums.

A version is the concatenation of all its tensors' bytes (little-endian, row-major), each at a
multiple of 64, cut into chunks of equal size. The manifest is a msgpack map:

    format        1
    kind          "full"; other kinds come later and are refused until then
    version       int, the number in the id of its stream entry
    token         int, with version and index the name of each chunk's key
    nbytes        int, bytes of all chunks together
    chunk_bytes   int, bytes of every chunk but the last
    tensors       list of maps: name, dtype, shape, offset; alias names the earlier tensor whose
                  bytes a tied one shares, at the same offset
    checksums     bytes: xxh3_64 of each chunk, 8 bytes big-endian

Readers ignore keys that they do not know. What is read here came over the network: nothing is
allocated, and nothing believed, before all of it was checked.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any, Final

import msgpack

from redrb.errors import DecodeError
from redrb.weights.layout import ALIGNMENT, ITEM_BYTES, Layout, TensorEntry

FORMAT: Final = 1
KIND_FULL: Final = "full"

MAX_VERSION: Final = 2**53 - 1
MAX_MANIFEST_BYTES: Final = 64 << 20
MAX_CHUNK_BYTES: Final = 64 << 20
MAX_CHUNKS: Final = 1 << 20
MAX_TENSORS: Final = 1 << 18
MAX_DIMENSIONS: Final = 64
MAX_NAME_LENGTH: Final = 1024


@dataclass(frozen=True, slots=True)
class WeightVersion:
    """A published version.

    Attributes:
        name: Name of the weights.
        version: Its number, >= 1; each is larger than the one before.
        kind: "full": all tensors, complete.
        nbytes: Bytes in Redis, without the manifest.
        tensors: Number of tensors, tied ones counted by each name.
        chunks: Number of keys that hold them.
        created_s: Seconds since the epoch at the commit, by the server's clock.
    """

    name: str
    version: int
    kind: str
    nbytes: int
    tensors: int
    chunks: int
    created_s: float


@dataclass(frozen=True, slots=True)
class Manifest:
    """All that a reader needs to fetch a version and to check it."""

    version: int
    token: int
    layout: Layout
    checksums: tuple[int, ...]
    kind: str = KIND_FULL

    def describe(self, name: str, created_s: float) -> WeightVersion:
        """Return what users see of this version."""
        layout = self.layout
        return WeightVersion(
            name,
            self.version,
            self.kind,
            layout.nbytes,
            len(layout.tensors),
            layout.chunks,
            created_s,
        )


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the manifest as stored."""
    layout = manifest.layout
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
    stored: bytes = msgpack.packb(
        {
            "format": FORMAT,
            "kind": manifest.kind,
            "version": manifest.version,
            "token": manifest.token,
            "nbytes": layout.nbytes,
            "chunk_bytes": layout.chunk_bytes,
            "tensors": tensors,
            "checksums": struct.pack(f">{len(manifest.checksums)}Q", *manifest.checksums),
        }
    )
    return stored


def decode_manifest(stored: bytes) -> Manifest:
    """Return the manifest in `stored` after checking all of it.

    Raises:
        DecodeError: It is damaged, hostile, or of a later format.
    """
    if len(stored) > MAX_MANIFEST_BYTES:
        raise DecodeError(f"a manifest of {len(stored)} bytes: at most {MAX_MANIFEST_BYTES} are.")
    try:
        fields = msgpack.unpackb(stored)
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise DecodeError(f"the manifest is not msgpack: {error}.") from error
    if not isinstance(fields, dict):
        raise DecodeError(f"the manifest is a {type(fields).__name__}: it must be a map.")
    if fields.get("format") != FORMAT or fields.get("kind") != KIND_FULL:
        raise DecodeError(
            f"a manifest of format {fields.get('format')!r:.20} and kind "
            f"{fields.get('kind')!r:.20}: this redrb reads format {FORMAT} and kind {KIND_FULL!r}. "
            "Upgrade the reader."
        )
    layout = Layout(
        tensors=_tensors(fields.get("tensors")),
        nbytes=_integer(fields, "nbytes", 0, MAX_VERSION),
        chunk_bytes=_integer(fields, "chunk_bytes", 1, MAX_CHUNK_BYTES),
    )
    _check_places(layout)
    return Manifest(
        version=_integer(fields, "version", 1, MAX_VERSION),
        token=_integer(fields, "token", 1, MAX_VERSION),
        layout=layout,
        checksums=_checksums(fields.get("checksums"), layout.chunks),
    )


def _integer(fields: dict[str, Any], name: str, least: int, most: int) -> int:
    value = fields.get(name)
    if type(value) is not int or not least <= value <= most:
        raise DecodeError(f"manifest: {name} is {value!r:.40}, not an integer {least} to {most}.")
    return value


def _tensors(value: object) -> tuple[TensorEntry, ...]:
    if not isinstance(value, list) or len(value) > MAX_TENSORS:
        raise DecodeError(f"manifest: tensors is not a list of at most {MAX_TENSORS}.")
    tensors: dict[str, TensorEntry] = {}
    for fields in value:
        tensor = _tensor(fields)
        if tensor.name in tensors:
            raise DecodeError(f"manifest: tensor {tensor.name!r:.80} is listed twice.")
        if tensor.alias is not None:
            _check_alias(tensor, tensors.get(tensor.alias))
        tensors[tensor.name] = tensor
    return tuple(tensors.values())


def _tensor(fields: object) -> TensorEntry:
    if not isinstance(fields, dict):
        raise DecodeError("manifest: an item of tensors is not a map.")
    name, dtype, alias = fields.get("name"), fields.get("dtype"), fields.get("alias")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_LENGTH:
        raise DecodeError(f"manifest: {name!r:.80} is not a tensor's name.")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise DecodeError(f"manifest: tensor {name!r:.80} has the unknown dtype {dtype!r:.40}.")
    if not (alias is None or isinstance(alias, str)):
        raise DecodeError(f"manifest: tensor {name!r:.80} has the alias {alias!r:.40}.")
    shape = _shape(name, fields.get("shape"), ITEM_BYTES[dtype])
    return TensorEntry(name, dtype, shape, _integer(fields, "offset", 0, MAX_VERSION), alias)


def _shape(name: str, value: object, item_bytes: int) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > MAX_DIMENSIONS:
        raise DecodeError(f"manifest: tensor {name!r:.80} has no shape of up to 64 dimensions.")
    if not all(type(size) is int and 0 <= size <= MAX_VERSION for size in value):
        raise DecodeError(f"manifest: tensor {name!r:.80} has the shape {value!r:.80}.")
    # sizes beside a 0 count too: strides are made of them
    if math.prod(max(size, 1) for size in value) * item_bytes > MAX_VERSION:
        raise DecodeError(f"manifest: tensor {name!r:.80} has too large a shape: {value!r:.80}.")
    return tuple(value)


def _check_alias(tensor: TensorEntry, owner: TensorEntry | None) -> None:
    if owner is None or owner.alias is not None:
        raise DecodeError(f"manifest: {tensor.name!r:.80} is tied to no tensor before it.")
    if (owner.dtype, owner.shape, owner.offset) != (tensor.dtype, tensor.shape, tensor.offset):
        raise DecodeError(f"manifest: {tensor.name!r:.80} differs from what it is tied to.")


def _check_places(layout: Layout) -> None:
    """Every byte belongs to one tensor at most, and lies inside."""
    if layout.chunks > MAX_CHUNKS:
        raise DecodeError(f"manifest: {layout.chunks} chunks, at most {MAX_CHUNKS} are.")
    end = 0
    for tensor in sorted(layout.tensors, key=lambda tensor: tensor.offset):
        if tensor.offset % ALIGNMENT:
            raise DecodeError(f"manifest: tensor {tensor.name!r:.80} is not aligned.")
        if tensor.alias is None and tensor.nbytes:
            if tensor.offset < end:
                raise DecodeError(f"manifest: tensor {tensor.name!r:.80} overlaps another.")
            end = tensor.offset + tensor.nbytes
        if max(end, tensor.offset) > layout.nbytes:
            raise DecodeError(f"manifest: tensor {tensor.name!r:.80} ends beyond the last byte.")
    if layout.nbytes - end >= ALIGNMENT:
        raise DecodeError(f"manifest: {layout.nbytes} bytes, but the tensors end at {end}.")


def _checksums(value: object, chunks: int) -> tuple[int, ...]:
    if not isinstance(value, bytes) or len(value) != 8 * chunks:
        raise DecodeError(f"manifest: checksums are not 8 bytes for each of {chunks} chunks.")
    return struct.unpack(f">{chunks}Q", value)
