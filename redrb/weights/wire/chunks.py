"""Chunks on the wire: sent as pieces of live memory, received into live memory, and checked."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, TypeVar

import xxhash

from redrb.connection import Client
from redrb.connection.bulk import read_into
from redrb.connection.transport import first_error, packed, read_reply
from redrb.errors import WeightCorrupt, WeightError
from redrb.weights.wire.delta import Bytes

T = TypeVar("T")

BATCH = 16
"""Chunks between two looks at the replies; each batch has the client's whole time for retries."""

_IN_FLIGHT = 3  # replies of one connection that are under way; more of them gain nothing
_PIECE = 512 << 10  # is hashed, then sent while it is in the cache
_SMALL = 64 << 10  # pieces below are joined: a system call costs more than the copy
_CRLF = b"\r\n"


class ChunkGoneError(WeightError):
    """A chunk was evicted while it was fetched."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A value about to be stored.

    Attributes:
        key: Its key.
        segments: Its bytes; they must not change until `stage` returns.
        seen: Called with each part of it just before that is sent the first time, in order: what
            hashes it finds it in memory, and leaves it in the cache for the socket.
    """

    key: str
    segments: Sequence[Bytes]
    seen: Callable[[memoryview], object] = len

    @property
    def nbytes(self) -> int:
        """Bytes of the value."""
        return sum(len(segment) for segment in self.segments)


@dataclass(frozen=True, slots=True)
class Incoming:
    """A value about to be fetched.

    Attributes:
        key: Its key.
        segments: Where it goes.
        checksum: xxh3_64 of all segments together.
        done: Called when it is there and right.
    """

    key: str
    segments: Sequence[Bytes]
    checksum: int
    done: Callable[[], None] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that the value must have."""
        return sum(len(segment) for segment in self.segments)


def checksum_of(segments: Iterable[Bytes]) -> int:
    """Return xxh3_64 of all segments together."""
    state = xxhash.xxh3_64()
    for segment in segments:
        state.update(segment.data)
    return state.intdigest()


def batches(items: Iterable[T], size: int = BATCH) -> Iterator[list[T]]:
    """Cut `items` into lists of `size`, the last one shorter."""
    remaining = iter(items)
    while batch := list(islice(remaining, size)):
        yield batch


def stage(client: Client, values: Iterable[Outgoing], *, expire_s: int) -> None:
    """Store values that vanish after `expire_s` seconds unless they are made permanent.

    Args:
        client: Where to.
        values: What; the segments of `BATCH` values at a time must stay as they are. On one server
            each is asked for just before it is sent.
        expire_s: When they vanish.

    Raises:
        StoreError: Redis refused one, or stayed away.
    """
    remaining = iter(values)
    for first in remaining:
        batch = chain([first], islice(remaining, BATCH - 1))
        if client.at(first.key) is client:
            client.retrying(_staging(client, batch, expire_s))
            continue
        for own, part in _by_node(client, list(batch), lambda value: value.key):
            own.retrying(_staging(own, part, expire_s))


def fetch(client: Client, values: Sequence[Incoming]) -> None:
    """Fetch values into memory, and check each.

    Raises:
        ChunkGoneError: One is not there any more.
        WeightCorrupt: One has another checksum or size than was said.
        StoreError: Redis stayed away.
    """
    for own, batch in _by_node(client, values, lambda value: value.key):
        own.retrying(_fetching(own, batch))


def _by_node(
    client: Client, values: Sequence[T], key_of: Callable[[T], str]
) -> Iterator[tuple[Client, list[T]]]:
    """Return values with the client that serves their keys; keys with one tag have one client."""
    tags: dict[str, list[T]] = {}
    for value in values:
        tags.setdefault(key_of(value).partition("}")[0], []).append(value)
    for own in tags.values():
        yield client.at(key_of(own[0])), own


def _staging(client: Client, values: Iterable[Outgoing], expire_s: int) -> Callable[[], None]:
    # NX: what a broken connection delivers late, after the same was sent again and its version
    # committed, would give the key its time to live back
    tail = _CRLF + packed("EX", expire_s, "NX")
    coming = iter(values)
    sent: list[Outgoing] = []  # for the case that all has to be sent again

    def attempt() -> None:
        with client.connection() as connection:
            for value in sent:
                _send(connection, _command(value, tail, len))
            for value in coming:
                sent.append(value)
                parts = _command(value, tail, value.seen)
                try:
                    _send(connection, parts)
                except BaseException:
                    deque(parts, maxlen=0)  # the rest is to be seen as well: it is sent again
                    raise
            replies = [read_reply(connection) for _ in sent]
        error = first_error(replies)
        if error is not None:
            raise error

    return attempt


def _command(
    value: Outgoing, tail: bytes, seen: Callable[[memoryview], object]
) -> Iterator[bytes | memoryview]:
    small = bytearray(b"*6\r\n%b$%d\r\n" % (packed("SET", value.key), value.nbytes))
    for segment in value.segments:
        if len(segment) < _SMALL:
            seen(segment.data)
            small += segment.data
            continue
        if small:
            yield bytes(small)
            small.clear()
        for start in range(0, len(segment), _PIECE):
            piece = segment[start : start + _PIECE].data
            seen(piece)
            yield piece
    small += tail
    yield bytes(small)


def _fetching(client: Client, values: Sequence[Incoming]) -> Callable[[], None]:
    def attempt() -> None:
        with client.connection() as connection:
            asked = 0
            for received, value in enumerate(values):
                while asked < len(values) and asked - received < _IN_FLIGHT:
                    _send(connection, [b"*2\r\n" + packed("GET", values[asked].key)])
                    asked += 1
                _take(connection, value)

    return attempt


def _take(connection: Any, value: Incoming) -> None:
    checksum = xxhash.xxh3_64()
    segments = [segment.data for segment in value.segments]
    # a value of another size is not received: it may be huge
    length = read_into(connection, segments, value.nbytes, seen=checksum.update)
    if length <= 0 < value.nbytes:
        raise ChunkGoneError(f"{value.key} is not there any more.")
    if length != value.nbytes or checksum.intdigest() != value.checksum:
        raise WeightCorrupt(
            f"{value.key} does not match its checksum. See who else writes to that key, and let a "
            "new WeightPublisher publish: its first version is sent whole."
        )
    if value.done is not None:
        value.done()


def _send(connection: Any, parts: Iterable[bytes | memoryview]) -> None:
    connection.send_packed_command(parts)
