"""Constants and limits of the wire format, which `docs/wire-format.md` specifies, and msgpack."""

from __future__ import annotations

import struct
import sys
from typing import Any, Final, NoReturn, TypeVar

import msgpack

from redrb.errors import DecodeError
from redrb.experience.status import Status

if sys.byteorder != "little":
    raise ImportError("redrb.codec copies bytes as they are: it needs a little-endian machine")

T = TypeVar("T")

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
MAX_NESTING: Final = 64
"""Levels of lists and maps in a msgpack object; a deeper one breaks `repr`, `copy` and `pickle`."""
MAX_CONTAINERS: Final = 1 << 18
"""Lists and maps in a msgpack object: one of a byte takes up to 72 bytes of memory."""
_UNCHECKED_BYTES: Final = 4096
_HEADS: Final = bytes([*range(0x80, 0xA0), 0xDC, 0xDD, 0xDE, 0xDF])
"""First bytes of lists and maps."""
_CONTAINERS: Final = frozenset((list, dict))

MIN_RUN: Final = 16
"""A run at a sample's start or end is recorded, not stored, from this many elements on."""


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


def decoded_limit(blob_bytes: int) -> int:
    """Return how many bytes a blob of this size may decode to."""
    return DECODED_BYTES + DECODED_PER_BYTE * blob_bytes


# ValueError: msgpack's FormatError, StackError and ExtraData, broken UTF-8, foreign keys.
# OverflowError: far times. TypeError: lists as keys. RecursionError: msgpack without its extension.
_UNPACK_ERRORS = (ValueError, OverflowError, TypeError, RecursionError)


def unpack(data: bytes | memoryview, what: str, *, levels: int = MAX_NESTING) -> Any:
    """Unpack one msgpack object from an untrusted source.

    Maps keep their order and need distinct keys of str or bytes; timestamps become aware datetimes.

    Args:
        data: Its bytes.
        what: Names it in errors.
        levels: Most levels of lists and maps.

    Raises:
        DecodeError: It is not exactly one well-formed object, has too many levels, or more than
            `MAX_CONTAINERS` lists and maps.
    """
    large = len(data) > _UNCHECKED_BYTES
    counter = _Counter() if large or may_hold_more(data, levels) else None
    try:
        if large:
            _check_lengths(data)
        found = msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            timestamp=3,
            list_hook=counter and counter.of_list,
            object_pairs_hook=counter.of_map if counter else _distinct,
        )
        if counter and counter.count > levels:
            _check_nesting(found, levels)
    except (msgpack.UnpackException, *_UNPACK_ERRORS) as error:
        raise DecodeError(f"the {what} is not valid msgpack: {error}") from error
    return found


def may_hold_more(data: bytes | memoryview, containers: int) -> bool:
    """Return whether so many bytes of `data` may begin a list or map that there are more."""
    if len(data) <= containers:
        return False
    return len(data) - len(bytes(data).translate(None, _HEADS)) > containers


def _distinct(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a map has a key twice")
    return found


class _Counter:
    """Counts the lists and maps of one object while msgpack makes them; refuses too many."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def of_list(self, found: T) -> T:
        self.count += 1
        if self.count > MAX_CONTAINERS:
            raise ValueError(f"it has more than {MAX_CONTAINERS} lists and maps")
        return found

    def of_map(self, pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
        return self.of_list(_distinct(pairs))


def _check_nesting(value: Any, levels: int) -> None:
    """Refuse more levels of lists and maps, by a loop: recursion would be the danger itself."""
    level = [value] if type(value) in _CONTAINERS else []
    for _ in range(levels):
        level = [
            child
            for each in level
            for child in (each.values() if type(each) is dict else each)
            if type(child) in _CONTAINERS
        ]
    if level:
        raise ValueError(f"lists and maps are nested more than {levels} levels deep")


def _check_lengths(data: bytes | memoryview) -> None:
    """Refuse claimed lengths beyond the data, before lists of these lengths are allocated."""
    unpacker = msgpack.Unpacker(read_size=len(data), max_buffer_size=len(data))
    unpacker.feed(data)
    unpacker.skip()


def malformed(why: str) -> NoReturn:
    """Raise DecodeError for a blob that is no valid group."""
    raise DecodeError(f"not a valid group: {why}")
