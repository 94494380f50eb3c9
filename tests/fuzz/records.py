"""Msgpack from Redis: facts, messages and announcements, read or refused without much memory."""

from __future__ import annotations

from collections.abc import Iterator

import msgpack

from redrb.connection.messages import _unpacked
from redrb.errors import DecodeError
from redrb.stream.task.entries import unpack_facts
from redrb.watch.state.workers import worker_state


def one_input(data: bytes) -> None:
    """Read the same bytes as each kind of record."""
    for read in (unpack_facts, _message):
        try:
            assert isinstance(read(data), dict)
        except DecodeError:
            continue
    worker = worker_state("worker", 1.0, b"7 " + data)
    assert worker is None or worker.host.isprintable()


def _message(data: bytes) -> object:
    return _unpacked("key", [b"m", data])


def seeds() -> Iterator[bytes]:
    """Yield a record of each kind."""
    facts = {"size": 9, "samples": 2, "status": "failed", "score": 0.5, "tags": {"a": 1.0}}
    yield msgpack.packb(facts)
    yield msgpack.packb(facts) + msgpack.packb(7)
    said = {"role": "maker", "host": "a", "pid": 7, "uptime_s": 1.5, "metrics": {"reward": 0.5}}
    yield msgpack.packb(said | {"waits_for": "room", "ended": True})
    yield msgpack.packb({"step": 3, "losses": [0.5, 1e300], "state": {"a": [b"x", None, True]}})
