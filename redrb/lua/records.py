"""The record of a row of a table, for scripts and clients; `include/records.lua` describes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, TypeAlias

import msgspec

from redrb.keys import TableKeys

_PARTS: Final = ("token", "place", "bucket", "change", "cells")
"""What a segment holds, in this order; the cells are id and bytes of each column, to its end."""

SEGMENT: Final = {name: place for place, name in enumerate(_PARTS, start=1)}
"""Where the parts of a segment begin in scripts, which name them `SEGMENT.name`."""

TOKEN, PLACE, BUCKET, CHANGE, CELLS = range(len(_PARTS))

Segment: TypeAlias = Sequence[Any]

_Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
_RECORD: Final = msgspec.msgpack.Decoder(list[str | list[_Number | str]])


def read_record(record: bytes) -> tuple[str, list[Segment]]:
    """Return the head of a record and its segments; raises ValueError for what is none."""
    head, *segments = _RECORD.decode(record)
    return head, segments  # type: ignore[return-value]


def columns_of(segment: Segment) -> Sequence[int]:
    """Return the id of each column in a segment, 0 for one that was replaced."""
    return segment[CELLS::2]


def sizes_of(segment: Segment) -> Sequence[int]:
    """Return the bytes of each column in a segment."""
    return segment[CELLS + 1 :: 2]


def value_of(keys: TableKeys, segment: Segment) -> str:
    """Return the key of the value of a segment."""
    return keys.value(segment[BUCKET], segment[TOKEN], segment[PLACE])
