"""Constants, dtypes and limits of the wire format; `docs/wire-format.md` specifies it."""

from __future__ import annotations

import struct
import sys
from dataclasses import dataclass
from typing import Any, Final, NoReturn, TypeAlias

import msgpack
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from redrb.errors import DecodeError
from redrb.experience.records import TENSOR_FIELDS
from redrb.experience.status import Status

if sys.byteorder != "little":
    raise ImportError("redrb.codec copies bytes as they are: it needs a little-endian machine")

Storage: TypeAlias = NDArray[Any]
"""A tensor's elements as numpy integers: floats and bools by their bit patterns."""

MAGIC: Final = b"RDRB"
VERSION: Final = 1
PREFIX: Final = struct.Struct("<4sBBHII")
"""Magic, version, flags, then the lengths of schema, header and extras."""

MAX_BLOB_BYTES: Final = 512 << 20
"""The largest value that Redis stores."""
MAX_SCHEMA_BYTES: Final = (1 << 16) - 1
MAX_HEADER_BYTES: Final = 1 << 20
MAX_EXTRAS_BYTES: Final = 256 << 20
MAX_SAMPLES: Final = 4096
MAX_COLUMNS: Final = 128
MAX_TAGS: Final = 256
MAX_NAME_BYTES: Final = 256
"""Bytes of UTF-8 in a tensor's name or the key of a tag."""
MAX_GROUP_ID_BYTES: Final = 1024
MAX_RANK: Final = 8
MAX_ELEMENTS: Final = 1 << 31
"""Elements of one tensor; dimensions of 0 count as 1."""
MAX_BATCH_BYTES: Final = 4 << 30
"""Bytes of one padded batch."""
DECODED_BYTES: Final = 256 << 20
DECODED_PER_BYTE: Final = 64
INT64_RANGE: Final = range(-(2**63), 2**63)
_UNCHECKED_BYTES: Final = 4096

MIN_RUN: Final = 16
"""A run at a sample's start or end is recorded, not stored, from this many elements on."""


@dataclass(frozen=True, slots=True)
class DType:
    """One element type of the wire.

    Attributes:
        code: Its number on the wire.
        tensor: The tensors' dtype.
        carrier: Torch dtype of the same size that numpy has too.
        native: Numpy dtype of the carrier.
        storage: Numpy integer dtype that carries its bits.
        unsigned: The unsigned integer dtype of the same size.
        itemsize: Bytes of one element in memory.
        low: Smallest value of a run on the wire.
        high: Largest value of a run on the wire.
        wires: Codes that a body of this dtype may be stored as.
    """

    code: int
    tensor: torch.dtype
    carrier: torch.dtype
    native: np.dtype[Any]
    storage: np.dtype[Any]
    unsigned: np.dtype[Any]
    itemsize: int
    low: int
    high: int
    wires: frozenset[int]


# a new dtype also gets its code and its size in `redrb/codec/_core.c`
BOOL, INT8, INT16, INT32, INT64, UINT8, UINT16, UINT32, UINT64 = range(9)
FLOAT16, FLOAT32, FLOAT64, BFLOAT16, FLOAT8_E4M3FN, FLOAT8_E5M2 = range(9, 15)
_INTEGERS: Final = range(INT8, UINT64 + 1)
_TORCH: Final = (
    *(torch.bool, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.float16, torch.float32, torch.float64),
    *(torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
)
_STORAGE: Final = (
    *("u1", "i1", "i2", "i4", "i8"),
    *("u1", "u2", "u4", "u8"),
    *("u2", "u4", "u8"),
    *("u2", "u1", "u1"),
)
_CARRIERS: Final = {BFLOAT16: torch.int16, FLOAT8_E4M3FN: torch.uint8, FLOAT8_E5M2: torch.uint8}


def _make_dtype(code: int) -> DType:
    storage = np.dtype("<" + _STORAGE[code])
    low, high = (0, 1) if code == BOOL else _range(storage)
    wires = {code}
    if code in _INTEGERS:
        held = [(other, *_range(np.dtype(_STORAGE[other]))) for other in _INTEGERS]
        wires |= {BOOL, *(other for other, least, most in held if least >= low and most <= high)}
    elif code in (FLOAT32, FLOAT64):
        wires |= {FLOAT16, BFLOAT16}
    carrier = _CARRIERS.get(code, _TORCH[code])
    native = torch.empty(0, dtype=carrier).numpy().dtype
    unsigned = np.dtype(f"<u{storage.itemsize}")
    types = (_TORCH[code], carrier, native, storage, unsigned, storage.itemsize)
    return DType(code, *types, low, high, frozenset(wires))


def _range(storage: np.dtype[Any]) -> tuple[int, int]:
    info = np.iinfo(storage)
    return int(info.min), int(info.max)


DTYPES: Final = tuple(_make_dtype(code) for code in range(len(_TORCH)))
BY_TORCH: Final = {dtype.tensor: dtype for dtype in DTYPES}
STATUSES: Final = (
    Status.INIT,
    Status.COMPLETED,
    Status.ABORTED,
    Status.EXPIRED,
    Status.FAILED,
    Status.FILTERED,
    Status.ARCHIVED,
)
STATUS_CODES: Final = {status: code for code, status in enumerate(STATUSES)}
COMPLETED: Final = STATUS_CODES[Status.COMPLETED]
FIELD_CODES: Final = {name: code for code, name in enumerate(TENSOR_FIELDS)}


def storage_of(tensor: Tensor, dtype: DType) -> Storage:
    """Return a contiguous CPU tensor's elements, flat and without a copy."""
    if dtype.carrier is not dtype.tensor:
        tensor = tensor.view(dtype.carrier)
    array: Storage = tensor.numpy()
    return array.reshape(-1).view(dtype.storage)


def tensor_of(array: Storage, dtype: DType) -> Tensor:
    """Return the tensor whose elements `array` holds, without a copy."""
    tensor = torch.from_numpy(array.view(dtype.native))
    return tensor if dtype.carrier is dtype.tensor else tensor.view(dtype.tensor)


def decoded_limit(blob_bytes: int) -> int:
    """Return how many bytes a blob of this size may decode to."""
    return DECODED_BYTES + DECODED_PER_BYTE * blob_bytes


# ValueError: msgpack's FormatError, StackError and ExtraData, broken UTF-8, foreign keys.
# OverflowError: far times. TypeError: lists as keys. RecursionError: msgpack without its extension.
_UNPACK_ERRORS = (ValueError, OverflowError, TypeError, RecursionError)


def unpack(data: bytes | memoryview, what: str) -> Any:
    """Unpack one msgpack object from an untrusted source.

    Maps keep their order and need distinct keys of str or bytes; timestamps become aware datetimes.

    Raises:
        DecodeError: It is not exactly one well-formed object.
    """
    try:
        if len(data) > _UNCHECKED_BYTES:
            _check_lengths(data)
        return msgpack.unpackb(
            data, raw=False, strict_map_key=True, timestamp=3, object_pairs_hook=_distinct
        )
    except (msgpack.UnpackException, *_UNPACK_ERRORS) as error:
        raise DecodeError(f"the {what} is not valid msgpack: {error}") from error


def _check_lengths(data: bytes | memoryview) -> None:
    """Refuse claimed lengths beyond the data, before lists of these lengths are allocated."""
    unpacker = msgpack.Unpacker(read_size=len(data), max_buffer_size=len(data))
    unpacker.feed(data)
    unpacker.skip()


def _distinct(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a map has a key twice")
    return found


def malformed(why: str) -> NoReturn:
    """Raise DecodeError for a blob that is no valid group."""
    raise DecodeError(f"not a valid group: {why}")
