"""Packs values of users as msgpack, so that `redrb.unpacking` returns equal ones."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

import msgpack

from redrb.unpacking import MAX_NESTING, unpack

FLAT: Final = frozenset((str, int, float, bool, bytes, type(None)))
"""Types whose values come back equal whenever they can be packed."""

# BufferError: parts of memory that do not lie in one piece
_PACK_ERRORS = (TypeError, ValueError, OverflowError, BufferError)


def pack(value: object, *, strict: bool = False) -> bytes:
    """Return a value as msgpack, which may unpack as another one: see `pack_equal`.

    Args:
        strict: Refuse subclasses of the types that msgpack has, too.

    Raises:
        ValueError: msgpack does not hold it.
    """
    try:
        packed: bytes = msgpack.packb(value, datetime=True, strict_types=strict)
    except _PACK_ERRORS as error:
        raise ValueError(str(error)) from error
    return packed


def pack_equal(value: object, *, strict: bool = False, levels: int = MAX_NESTING) -> bytes:
    """Return a value as msgpack that can be unpacked, to an equal value.

    Aware datetimes are equal if they are the same time, nan equals nan, and bytearrays bytes.

    Args:
        strict: Refuse subclasses of the types that msgpack has, too.
        levels: Levels of lists and dicts that the value may have.

    Raises:
        ValueError: There is none, such as of a tuple, or of a time that no calendar has.
    """
    packed = pack(value, strict=strict)
    if type(value) not in FLAT:
        found = unpack(packed, "value", levels=levels)
        if found != value:
            _check_same(value, found)
    return packed


def _check_same(given: Any, found: Any) -> None:
    """Raise ValueError for the first part of a value that was unpacked as another one."""
    if type(found) is list and isinstance(given, list):
        for one, other in zip(given, found, strict=True):
            _check_same(one, other)
        return
    if type(found) is dict and isinstance(given, dict):
        for pair in zip(given.items(), found.items(), strict=True):
            for one, other in zip(*pair, strict=True):
                _check_same(one, other)
        return
    # an hour that clocks repeat equals no time of another zone
    same = given.astimezone(UTC) if isinstance(given, datetime) else given
    if same == same and same != found:  # nan differs from itself
        kind, other = type(given).__name__, type(found).__name__
        why = "another one" if kind == other else f"a {other}"
        raise ValueError(f"a {kind} would come back as {why}: {given!r:.80}")
