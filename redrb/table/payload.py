"""The values of a table: what a put stores of each row, one string each, spread over the nodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Final, NamedTuple

from redrb.connection import Client
from redrb.connection.client import Request
from redrb.connection.transport import Pipeline, Replication, Reply, without_errors
from redrb.keys import TableKeys, bucket_of
from redrb.table.values import Piece

CHUNK_BYTES: Final = 32 << 20
"""Most bytes of values in one request, unless one value is larger."""

AT_ONCE: Final = 8
"""Requests that are under way together, on the nodes of a cluster."""


class StoredValue(NamedTuple):
    """The value of one row in one put: its columns follow each other."""

    key: str
    pieces: Sequence[Piece]
    nbytes: int


def values_of(
    keys: TableKeys, token: str, rows: Sequence[bytes], columns: Sequence[Sequence[Sequence[Piece]]]
) -> tuple[list[StoredValue], list[int], list[int]]:
    """Return the values of a put, the bucket of each row, and the bytes of each column, by row."""
    values: list[StoredValue] = []
    sizes: list[int] = []
    buckets = [bucket_of(row) for row in rows]
    lengths = [[sum(map(len, cell)) for cell in column] for column in columns]
    cells = zip(buckets, zip(*columns, strict=True), zip(*lengths, strict=True), strict=True)
    for place, (bucket, of_row, nbytes) in enumerate(cells):
        sizes += nbytes
        pieces = list(chain.from_iterable(of_row))
        values.append(StoredValue(keys.value(bucket, token, place), pieces, sum(nbytes)))
    return values, sizes, buckets


def check_largest(client: Client, values: Sequence[StoredValue], rows: Sequence[str]) -> None:
    """Raise EncodeError, which names the row, if the server does not take a value; none is sent."""
    if values:
        value, row = max(zip(values, rows, strict=True), key=lambda each: each[0].nbytes)
        what = f"row {row!r}, with all columns of this put,"
        remedy = "put smaller values, or its columns one after the other, or "
        client.check_size(value.nbytes, what, remedy)


def by_node(client: Client, keys: Iterable[str]) -> dict[Client, list[int]]:
    """Return the places of keys, by the client for the requests that name them together."""
    names = list(keys)
    if not names or client.at(names[0]) is client:  # one server
        return {client: list(range(len(names)))} if names else {}
    found: dict[Client, list[int]] = {}
    clients: dict[str, Client] = {}
    for place, key in enumerate(names):
        tag = key[: key.index("}")]
        if tag not in clients:
            clients[tag] = client.at(key)
        found.setdefault(clients[tag], []).append(place)
    return found


def store(client: Client, values: Sequence[StoredValue]) -> None:
    """Store values; raises StoreUnavailable or StoreError, and some may be stored then."""
    replication, requests = Replication(client.min_replicas), []

    def confirmed(replies: list[Reply]) -> list[Reply]:
        done, replicas = replication.divide(replies)
        without_errors(done)
        replication.check(replicas)
        return done

    for node, pages in _pages(client, [(value.key, value.nbytes) for value in values]):
        for page in pages:
            pipeline = Pipeline()
            pipeline.add_values([values[place] for place in page])
            replication.add_to(pipeline)
            requests.append(Request(node, pipeline, confirmed))
    exchange(requests)


class Wanted(NamedTuple):
    """A part of a value to read: all of it, or `length` bytes from `begin`."""

    key: str
    begin: int
    length: int
    whole: bool


def read(client: Client, wanted: Sequence[Wanted]) -> list[bytes | None]:
    """Read parts of values; None where one is not there as a whole."""
    found: list[bytes | None] = [None] * len(wanted)
    requests: list[Request[list[Reply]]] = []
    parts = []
    for node, pages in _pages(client, [(one.key, one.length) for one in wanted]):
        for page in pages:
            pipeline = Pipeline()
            whole = all(wanted[place].whole for place in page)
            if whole:
                pipeline.add("MGET", *[wanted[place].key for place in page])
            else:
                for key, begin, length, _ in [wanted[place] for place in page]:
                    pipeline.add("GETRANGE", key, begin, begin + length - 1)
            parts.append((page, whole))
            requests.append(Request(node, pipeline, without_errors))
    for (page, whole), replies in zip(parts, exchange(requests), strict=True):
        for place, reply in zip(page, replies[0] if whole else replies, strict=True):
            there = type(reply) is bytes and len(reply) == wanted[place].length
            found[place] = reply if there else None
    return found


def _pages(
    client: Client, values: Sequence[tuple[str, int]]
) -> Iterator[tuple[Client, list[list[int]]]]:
    """Yield each node's client, and the places of values in pages of `CHUNK_BYTES` at most."""
    for node, places in by_node(client, [key for key, _ in values]).items():
        pages: list[list[int]] = [[]]
        left = CHUNK_BYTES
        for place in places:
            nbytes = values[place][1]
            if pages[-1] and nbytes > left:
                pages.append([])
                left = CHUNK_BYTES
            pages[-1].append(place)
            left -= nbytes
        yield node, pages


def unlink(client: Client, keys: Sequence[str]) -> None:
    """Delete values; those that are gone are no error."""
    requests = []
    for node, places in by_node(client, keys).items():
        pipeline = Pipeline()
        pipeline.add("UNLINK", *[keys[place] for place in places])
        requests.append(Request(node, pipeline, without_errors))
    exchange(requests)


def exchange(requests: Sequence[Request[list[Reply]]]) -> list[list[Reply]]:
    """Send requests, several at once, and return their replies."""
    replies = []
    for first in range(0, len(requests), AT_ONCE):
        page = requests[first : first + AT_ONCE]
        try:
            if len(page) > 1:
                for request in page:
                    request.begin()
            replies += [request.result() for request in page]
        finally:
            for request in page:
                request.drop()
    return replies
