"""Queries over tags: one normal form, or an error that names the mistake.

Input is JSON, or msgpack behind a zero byte: that holds bytes, large numbers and dates, too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import msgpack

from redrb.errors import ConfigError, DecodeError
from redrb.stream.task.queries import parse_where
from redrb.unpacking import unpack

TAGS = ("score", "source", "solved")


def one_input(data: bytes) -> None:
    """Parse one query; its normal form is JSON and the same each time."""
    try:
        where = unpack(data[1:], "query") if data[:1] == b"\0" else json.loads(data)
    except (DecodeError, ValueError, RecursionError):
        return
    try:
        normal = parse_where(where, TAGS)
    except ConfigError:
        return
    assert normal == parse_where(where, TAGS)
    assert normal == "" or isinstance(json.loads(normal), dict)


def seeds() -> Iterator[bytes]:
    """Yield queries in both spellings."""
    queries = [
        {},
        {"source": "math", "score_gt": 0.8},
        {"source": "math", "$or": [{"score": {"$gt": 0.8, "$lte": 2}}, {"solved": True}]},
        {"source": {"$in": ["math", "code", 3]}, "score_ne": 0.5, "solved": {"$not_in": [False]}},
        {"$and": [{"score_between": [0.25, 1e308]}, {"score": {"$lt": -1}}]},
    ]
    for query in queries:
        yield json.dumps(query).encode()
        yield b"\0" + msgpack.packb(query)
