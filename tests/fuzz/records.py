"""Msgpack from Redis: facts of groups and messages, read or refused without much memory."""

from __future__ import annotations

from collections.abc import Iterator

import msgpack

from redrb.connection.messages import _unpacked
from redrb.errors import DecodeError
from redrb.stream.task.facts import unpack_facts


def one_input(data: bytes) -> None:
    """Read the same bytes as each kind of record."""
    for read in (unpack_facts, _message):
        try:
            assert isinstance(read(data), dict)
        except DecodeError:
            continue


def _message(data: bytes) -> object:
    return _unpacked("key", [b"m", data])


def seeds() -> Iterator[bytes]:
    """Yield a record of each kind."""
    facts = {"size": 9, "samples": 2, "status": "failed", "score": 0.5, "tags": {"a": 1.0}}
    yield msgpack.packb(facts)
    yield msgpack.packb(facts) + msgpack.packb(7)
    yield msgpack.packb({"step": 3, "losses": [0.5, 1e300], "state": {"a": [b"x", None, True]}})
