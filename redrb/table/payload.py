"""The values of a table: what a put stores of each row, one string each, spread over the nodes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from redrb.connection import Client
from redrb.connection.request import Request
from redrb.connection.transport import Pipeline, Reply, packed, without_errors
from redrb.keys import TableKeys, bucket_of
from redrb.table.values import Piece

CHUNK_BYTES: Final = 32 << 20
"""Most bytes of values in one request, unless one value is larger."""

AT_ONCE: Final = 8
"""Requests that are under way together, on the nodes of a cluster."""


@dataclass(frozen=True, slots=True)
class StoredValue:
    """The value of one row in one put: its columns follow each other.

    Attributes:
        pieces: What it is made of.
    """

    key: str
    pieces: Sequence[Piece]
    nbytes: int

    def add_to(self, pipeline: Pipeline) -> None:
        """Append the command that stores it."""
        pipeline.add_payload(packed("SET", self.key), 3, self.pieces, self.nbytes)


def values_of(
    keys: TableKeys, token: str, rows: Sequence[bytes], columns: Sequence[Sequence[Sequence[Piece]]]
) -> tuple[list[StoredValue], list[int], list[int]]:
    """Return the values of a put, the bucket of each row, and the bytes of each column, by row."""
    values, sizes, buckets = [], [], [bucket_of(row) for row in rows]
    for place, bucket in enumerate(buckets):
        cells = [column[place] for column in columns]
        lengths = [sum(map(len, cell)) for cell in cells]
        pieces = [piece for cell in cells for piece in cell]
        sizes += lengths
        values.append(StoredValue(keys.value(bucket, token, place), pieces, sum(lengths)))
    return values, sizes, buckets


def by_node(client: Client, keys: Iterable[str]) -> dict[Client, list[int]]:
    """Return the places of keys, by the client for the requests that name them together."""
    found: dict[Client, list[int]] = {}
    clients: dict[str, Client] = {}
    for place, key in enumerate(keys):
        tag = key[: key.index("}")]
        if tag not in clients:
            clients[tag] = client.at(key)
        found.setdefault(clients[tag], []).append(place)
    return found


def store(client: Client, values: Sequence[StoredValue]) -> None:
    """Store values; raises StoreUnavailable or StoreError, and some may be stored then."""
    requests = []
    for node, places in by_node(client, [value.key for value in values]).items():
        pipeline, nbytes = Pipeline(), 0
        for place in places:
            if nbytes and nbytes + values[place].nbytes > CHUNK_BYTES:
                requests.append(Request(node, pipeline, without_errors))
                pipeline, nbytes = Pipeline(), 0
            values[place].add_to(pipeline)
            nbytes += values[place].nbytes
        requests.append(Request(node, pipeline, without_errors))
    exchange(requests)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A part of a value to read: all of it, or `length` bytes from `begin`."""

    key: str
    begin: int
    length: int
    whole: bool

    def add_to(self, pipeline: Pipeline) -> None:
        """Append the command that reads it."""
        if self.whole:
            pipeline.add("GET", self.key)
        else:
            pipeline.add("GETRANGE", self.key, self.begin, self.begin + self.length - 1)


def read(client: Client, wanted: Sequence[Wanted]) -> list[bytes | None]:
    """Read parts of values; None where one is not there as a whole."""
    found: list[bytes | None] = [None] * len(wanted)
    requests: list[Request[list[Reply]]] = []
    parts = []
    for node, places in by_node(client, [one.key for one in wanted]).items():
        first, nbytes = 0, 0
        for at, place in enumerate(places):
            if nbytes and nbytes + wanted[place].length > CHUNK_BYTES:
                parts.append(places[first:at])
                first, nbytes = at, 0
            nbytes += wanted[place].length
        parts.append(places[first:])
        while len(requests) < len(parts):
            pipeline = Pipeline()
            for place in parts[len(requests)]:
                wanted[place].add_to(pipeline)
            requests.append(Request(node, pipeline, without_errors))
    for part, replies in zip(parts, exchange(requests), strict=True):
        for place, reply in zip(part, replies, strict=True):
            whole = type(reply) is bytes and len(reply) == wanted[place].length
            found[place] = reply if whole else None
    return found


def unlink(client: Client, keys: Sequence[str]) -> None:
    """Delete values; those that are gone are no error."""
    requests = []
    for node, places in by_node(client, keys).items():
        pipeline = Pipeline()
        for place in places:  # a node refuses one command that names keys of several slots
            pipeline.add("UNLINK", keys[place])
        requests.append(Request(node, pipeline, without_errors))
    exchange(requests)


def exchange(requests: Sequence[Request[list[Reply]]]) -> list[list[Reply]]:
    """Send requests, several at once, and return their replies."""
    replies = []
    for first in range(0, len(requests), AT_ONCE):
        page = requests[first : first + AT_ONCE]
        if len(page) > 1:
            for request in page:
                request.begin()
        try:
            replies += [request.result() for request in page]
        finally:
            for request in page:
                request.drop()
    return replies
