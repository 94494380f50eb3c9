"""Chunks on the wire: sent from live memory, received into live memory, and checked."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any, TypeVar

import xxhash
from redis.exceptions import RedisError, ResponseError

from redrb.connection import Client
from redrb.connection.bulk import read_into, small_send_buffer
from redrb.connection.client import Request, Sent
from redrb.connection.failures import name_request
from redrb.connection.transport import Pipeline, first_error, packed, read_reply
from redrb.errors import WeightCorrupt, WeightError
from redrb.weights.wire.delta import Bytes

T = TypeVar("T")

BATCH = 16
"""Chunks that are sent before their replies are read; each batch is retried by itself."""

_IN_FLIGHT = 3  # requests before the first reply is read; more of them gain nothing
_PIECE = 512 << 10  # bytes that are hashed, then sent while they are in the processor's cache
_SMALL = 64 << 10  # smaller segments are joined: a system call costs more than the copy
_CRLF = b"\r\n"


class ChunkGoneError(WeightCorrupt):
    """A chunk was deleted or evicted while it was fetched."""


class KeyUsedError(WeightError):
    """A key that is to be stored has a value already, which was left as it is."""


@dataclass(frozen=True, slots=True)
class _Value:
    """A value of a key."""

    key: str
    segments: Sequence[Bytes]

    @property
    def nbytes(self) -> int:
        """Bytes of the value."""
        return sum(len(segment) for segment in self.segments)


@dataclass(frozen=True, slots=True)
class Outgoing(_Value):
    """A value about to be stored; its memory must not change until `upload` returns.

    Attributes:
        seen: Called with each part, in order, just before it is sent for the first time. A hash
            computed here leaves the bytes in the processor's cache for the socket.
    """

    seen: Callable[[memoryview], object] = len


@dataclass(frozen=True, slots=True)
class Incoming(_Value):
    """A value about to be fetched into its memory, which has as many bytes.

    Attributes:
        checksum: xxh3_64 of all segments together.
        done: Called after it was received and checked.
    """

    checksum: int
    done: Callable[[], None] | None = None


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


def upload(client: Client, values: Iterable[Outgoing], *, expire_s: int) -> None:
    """Store values that expire unless they are made permanent.

    Args:
        values: The values. The segments of `BATCH` values at a time must not change. On one server
            each value is taken from the iterable just before it is sent.

    Raises:
        KeyUsedError: A key existed when its value was sent for the first time.
        EncodeError: A value is larger than the server takes.
        StoreError: Redis refused a value, or stayed away.
    """
    remaining = iter(values)
    for first in remaining:
        batch = chain([first], islice(remaining, BATCH - 1))
        if client.at(first.key) is client:
            client.retrying(_staging(client, batch, expire_s))
            continue
        for node, part in by_node(client, list(batch), lambda value: value.key):
            node.retrying(_staging(node, part, expire_s))


def fetch(client: Client, values: Sequence[Incoming]) -> None:
    """Fetch values into memory and check each of them.

    On a cluster all slots are asked before the first reply is read, so the nodes send side by side.

    Raises:
        ChunkGoneError: A value does not exist any more.
        WeightCorrupt: A value has another checksum or size than expected.
        StoreError: Redis stayed away.
    """
    nodes = by_node(client, values, lambda value: value.key)
    side_by_side([_Fetch(node, batch) for node, batch in nodes])


def side_by_side(requests: Sequence[_Fetch] | Sequence[Request[Any]]) -> list[Any]:
    """Send all requests, then read their replies; returns their results."""
    try:
        for each in requests if len(requests) > 1 else ():
            each.begin()
        return [each.result() for each in requests]
    finally:
        for each in requests:
            each.drop()


def by_node(
    client: Client, values: Iterable[T], key_of: Callable[[T], str]
) -> Iterator[tuple[Client, list[T]]]:
    """Group values by hash tag, each group with the client of its node."""
    tags: dict[str, list[T]] = {}
    for value in values:
        tags.setdefault(key_of(value).partition("}")[0], []).append(value)
    for tagged in tags.values():
        yield client.at(key_of(tagged[0])), tagged


def _staging(client: Client, values: Iterable[Outgoing], expire_s: int) -> Callable[[], None]:
    # NX: a command that a broken connection delivers late, after the version was committed, must
    # not make the key expire again; so a value that is sent again may find itself there
    tail = _CRLF + packed("EX", expire_s, "NX")
    coming = iter(values)
    sent: list[Outgoing] = []  # to be sent again after an error

    def attempt() -> None:
        again = len(sent)
        with client.connection() as connection, small_send_buffer(connection):
            for value in sent:
                _send(connection, _command(value, tail, len))
            for value in coming:
                client.check_size(value.nbytes, f"a chunk of weights, {value.key},")
                sent.append(value)
                parts = _command(value, tail, value.seen)
                try:
                    _send(connection, parts)
                except BaseException:
                    deque(parts, maxlen=0)  # `seen` gets the rest too, since it is sent again
                    raise
            replies = [read_reply(connection) for _ in sent]
        error = first_error(replies)
        if error is not None:
            name_request(error, b"SET", sent[replies.index(error)].key.encode())
            raise error
        for value, reply in zip(sent[again:], replies[again:], strict=True):
            if reply is None:
                raise KeyUsedError(f"{value.key} exists already.")

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


class _Fetch:
    """Values of one slot: asked for by `begin`, received by `result`, which repeats the request."""

    def __init__(self, client: Client, values: Sequence[Incoming]) -> None:
        self._client = client
        self._values = values
        self._sent: Sent | None = None
        self._broke: RedisError | None = None

    def begin(self) -> None:
        """Ask for the first values, once; if that fails, `result` asks again."""
        pipeline = Pipeline()
        for value in self._values[:_IN_FLIGHT]:
            pipeline.add("GET", value.key)
        try:
            self._sent = self._client.begin(pipeline)
        except RedisError as error:
            self._broke = error

    def result(self) -> None:
        """Receive the values; asks for them if `begin` has not."""
        self._client.retrying(self._attempt)

    def drop(self) -> None:
        """Close the connection if replies are left unread on it."""
        sent, self._sent = self._sent, None
        if sent is not None:
            sent.drop()

    def _attempt(self) -> None:
        sent, self._sent = self._sent, None
        broke, self._broke = self._broke, None
        if broke is not None:
            raise broke
        if sent is not None:
            sent.read(partial(self._receive, asked=len(self._values[:_IN_FLIGHT])))
            return
        with self._client.connection() as connection:
            self._receive(connection, asked=0)

    def _receive(self, connection: Any, asked: int) -> None:
        for received, value in enumerate(self._values):
            while asked < len(self._values) and asked - received < _IN_FLIGHT:
                _send(connection, [b"*2\r\n" + packed("GET", self._values[asked].key)])
                asked += 1
            _receive(connection, value)


def _receive(connection: Any, value: Incoming) -> None:
    checksum = xxhash.xxh3_64()
    segments = [segment.data for segment in value.segments]
    # a value of another size is not received, since it may be huge
    try:
        length = read_into(connection, segments, value.nbytes, seen=checksum.update)
    except ResponseError as error:
        if str(error).startswith("WRONGTYPE"):
            problem = f"{value.key} has another type than redrb writes: {error}"
            raise WeightCorrupt(problem, key=value.key) from error
        name_request(error, b"GET", value.key.encode())
        raise
    if length <= 0 < value.nbytes:
        raise ChunkGoneError(f"{value.key} does not exist any more.", key=value.key)
    if length != value.nbytes or checksum.intdigest() != value.checksum:
        raise WeightCorrupt(f"{value.key} does not match its checksum.", key=value.key)
    if value.done is not None:
        value.done()


def _send(connection: Any, parts: Iterable[bytes | memoryview]) -> None:
    connection.send_packed_command(parts)
