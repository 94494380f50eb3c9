"""`Bench`: what a trial of a page works with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

import redrb
from redrb import ExperienceStream, LeaseLost
from redrb.connection import Client
from redrb.lua.calls import Call
from redrb.stream.take.calls import Beat, Take, TakeRequest
from tests.conftest import Opener
from tests.samples import numbered, numbers

R = TypeVar("R")

MOST_CALLS = 300
"""Calls after which a mechanism that has not ended is taken to have stopped."""

LONG = "x" * 70
"""Longer than a value of a small hash, which Redis scans as a whole whatever COUNT says."""

FOREVER_MS = 600_000
"""Longer than any test."""


@dataclass
class Bench:
    """One task, and means to look at it and to run its scripts one call at a time.

    Attributes:
        client: A client.
        namespace: The namespace of the task.
        open: Opens the task; every stream is audited and closed at the end.
        pages: Makes further pages small.
        patch: Makes constants of modules small.
        folder: A folder for files.
    """

    client: Client
    namespace: str
    open: Opener
    pages: Callable[..., None]
    patch: pytest.MonkeyPatch
    folder: Path

    def filled(self, count: int, **settings: Any) -> ExperienceStream:
        """Return a stream that has `count` groups of one sample, with the numbers from 0."""
        stream = self.open(**settings)
        stream.join_group()
        put(stream, count)
        return stream

    def run(self, call: Call[R], *beside: bytes) -> R:
        """Run the script of a call on the task once, and return its reply."""
        return call.run(self.client, [self.key("stream")], *beside)

    def key(self, kind: str, name: str = "") -> str:
        """Return a key of the task."""
        return f"redrb:{{{self.namespace}:math}}:{kind}{name and ':'}{name}"

    @contextmanager
    def task(self, name: str, **settings: Any) -> Iterator[ExperienceStream]:
        """Open another task."""
        found = redrb.ExperienceStream(self.client, name, namespace=self.namespace, **settings)
        with found:
            found.join_group()
            yield found
            assert found.stats().ledger.balanced

    def beat(self, stream: ExperienceStream) -> bool:
        """Send a heartbeat; returns whether there is more to take over."""
        consumer, incarnation = stream._consumer, stream.incarnation
        beat = Beat(stream.group, consumer.name, consumer.lease_ms, incarnation)
        return bool(self.run(beat, b"").more)

    def take_over(self, stream: ExperienceStream) -> None:
        """Send heartbeats until there is nothing more to take over."""
        until(lambda: not self.beat(stream))

    def queue(self, waiter: str, where: str = "", need: int = 1, ttl_ms: int = FOREVER_MS) -> int:
        """Let a take wait that finds fewer groups than it needs; returns how many there are."""
        revision = self.client.execute("HGET", self.key("task"), "revision").decode()
        asked = TakeRequest(need, need, where=where)
        lease = ("default", "other", f"other/of {waiter}", "1", asked, waiter)
        reply = self.run(Take(*lease, ttl_ms, FOREVER_MS, revision))
        assert reply.outcome == "short"
        return int(reply.amount)

    def is_woken(self, waiter: str) -> bool:
        """Return whether a waiter was woken since it last read its wake-up."""
        return bool(self.client.execute("DEL", self.key("wake", waiter)))

    def size(self, kind: str, name: str = "") -> int:
        """Return how many members a hash or a sorted set has."""
        key = self.key(kind, name)
        sizes = {b"hash": "HLEN", b"zset": "ZCARD", b"stream": "XLEN", b"list": "LLEN"}
        found = self.client.execute("TYPE", key)
        found = found if isinstance(found, bytes) else found.encode()
        return int(self.client.execute(sizes[found], key)) if found in sizes else 0


def put(stream: ExperienceStream, count: int, first: int = 0, **options: Any) -> tuple[int, ...]:
    """Put groups of one sample, with the numbers from `first`."""
    return stream.put_many([[numbered(first + number)] for number in range(count)], **options)


def until(is_over: Callable[[], object]) -> None:
    """Call until the result is true."""
    calls = 0
    while not is_over():
        calls += 1
        assert calls < MOST_CALLS, f"the mechanism has not ended after {calls} calls"


def is_acknowledged(lease: redrb.Lease) -> bool:
    """Acknowledge a lease; returns False if it was lost, and then with all its groups."""
    held = lease.ids
    try:
        lease.ack()
    except LeaseLost as error:
        lost = error.ids
    else:
        return True
    assert sorted(lost) == sorted(held)
    return False


def train(stream: ExperienceStream, expected: list[int]) -> None:
    """Take and acknowledge the groups that are left: exactly these, each once."""
    if expected:
        lease = stream.take(len(expected), timeout=0)
        assert sorted(numbers(lease)) == sorted(expected)
        lease.ack()
    ledger = stream.stats().ledger
    assert (ledger.waiting, ledger.leased) == (0, 0)
