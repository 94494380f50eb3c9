"""The trace of a group: element 7 of its header, for processes that trace groups."""

from __future__ import annotations

import struct
from typing import NamedTuple

import msgpack

from redrb.codec.layout import GroupLayout, tail_of
from redrb.codec.wire import MAX_BLOB_BYTES, MAX_HEADER_BYTES, PREFIX
from redrb.errors import DecodeError

_ELEMENT = 7
_DEFAULTS = (None, 1, None, None)
"""Defaults of the header's elements 3 to 6."""

_HEADER_AT = 8
"""Place of the header's length in the prefix."""


class GroupTrace(NamedTuple):
    """The span that put a group.

    Attributes:
        parent: The span, as W3C's header `traceparent` names it.
        put_ns: Time of its beginning, in ns since 1970 by the producer's clock.
    """

    parent: str
    put_ns: int


def with_trace(blob: bytes, trace: GroupTrace) -> bytes:
    """Return an encoded group with a trace; the same group if the limits leave no room for it."""
    *_, schema, header, _ = PREFIX.unpack_from(blob)
    start = PREFIX.size + schema
    count = blob[start] & 0x0F  # a header that redrb writes is a short list
    added = b"".join(map(msgpack.packb, (*_DEFAULTS[count - 3 :], list(trace))))
    if header + len(added) > MAX_HEADER_BYTES or len(blob) + len(added) > MAX_BLOB_BYTES:
        return blob
    return b"".join(
        (
            blob[:_HEADER_AT],
            struct.pack("<I", header + len(added)),
            blob[_HEADER_AT + 4 : start],
            bytes([0x90 | (_ELEMENT + 1)]),
            blob[start + 1 : start + header],
            added,
            blob[start + header :],
        )
    )


def trace_of(layout: GroupLayout) -> GroupTrace | None:
    """Return the trace of a group; None if it has none, or one that cannot be read."""
    group = layout.group
    if group.tails <= _ELEMENT - 3:
        return None
    try:
        tail = tail_of(group)
    except DecodeError:
        return None
    found = tail[_ELEMENT - 3]
    if type(found) is not list or len(found) != 2:
        return None
    parent, put_ns = found
    if type(parent) is not str or type(put_ns) is not int or not 0 < put_ns < 1 << 63:
        return None
    return GroupTrace(parent, put_ns)
