"""Constants and limits of the wire format, which `docs/reference/wire-format.md` specifies."""

from __future__ import annotations

import struct
import sys
from typing import Any, Final, NoReturn

from redrb.errors import DecodeError
from redrb.experience.status import Status

if sys.byteorder != "little":
    raise ImportError("redrb.codec copies bytes as they are: it needs a little-endian machine")

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
BATCH_BYTES: Final = 256 << 20
BATCH_PER_BYTE: Final = 4096
DECODED_BYTES: Final = 256 << 20
DECODED_PER_BYTE: Final = 64
INT64_RANGE: Final = range(-(2**63), 2**63)

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


def one_or_all(values: list[Any]) -> Any:
    """Return the one value if all are equal, else all values."""
    return values[0] if values.count(values[0]) == len(values) else values


def decoded_limit(blob_bytes: int) -> int:
    """Return how many bytes a blob of this size may decode to."""
    return DECODED_BYTES + DECODED_PER_BYTE * blob_bytes


def tensor_limit(blob_bytes: int) -> int:
    """Return how many tensors a blob of this size may hold."""
    return 65_536 + blob_bytes


def batch_limit(blob_bytes: int) -> int:
    """Return how many bytes a padded batch of blobs of this size together may have.

    A batch of one long sample and many short ones is padded to as many times its size as it has
    samples.
    """
    return min(BATCH_BYTES + BATCH_PER_BYTE * blob_bytes, MAX_BATCH_BYTES)


def malformed(why: str) -> NoReturn:
    """Raise DecodeError for a blob that is no valid group."""
    raise DecodeError(f"not a valid group: {why}")
