"""`Upload`: one put: its values, and the request that makes them visible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from redrb.connection import Client
from redrb.connection.client import Request
from redrb.connection.deadline import here
from redrb.connection.transport import SURE_BYTES
from redrb.errors import ConfigError, EncodeError, StoreFull
from redrb.lua.pages import PAGES
from redrb.table.calls import Put, Stored
from redrb.table.index import Index, Writing
from redrb.table.payload import (
    CHUNK_BYTES,
    StoredValue,
    by_node,
    check_largest,
    store,
    unlink,
    values_of,
)
from redrb.table.values import Piece
from redrb.unpacking import Reading

MOST_TAGS: Final = 15 << 20
"""Most bytes of the tags of a row: a saved file has room for them (`stream/saving/file.py`)."""


class Upload:
    """One put: its values and the request that makes them visible."""

    def __init__(
        self,
        client: Client,
        index: Index,
        keys: Sequence[str],
        columns: list[str],
        cells: Sequence[Sequence[Sequence[Piece]]],
        tags: Sequence[bytes],
    ) -> None:
        self._client, self._index, self._keys = client, index, keys
        self._columns, self._cells, self._tags = columns, cells, tags
        self._token, self._most_tags = "", SURE_BYTES
        self._values: list[StoredValue] = []
        self._sizes: list[int] = []
        self._buckets: list[int] = []

    def request(self, writing: Writing) -> Request[Stored]:
        """Return the request of the put; on several nodes its values are stored first."""
        if not self._token:
            self._token = f"{writing.identity.name[:16]}{writing.identity.operation:x}"
            if self._tags:
                nbytes, row = max(zip(map(len, self._tags), self._keys, strict=True))
                self._check_tags(nbytes, f"row {row!r}, its tags alone,")
            if self._columns:
                rows = [key.encode() for key in self._keys]
                self._values, self._sizes, self._buckets = values_of(
                    self._index.keys, self._token, rows, self._cells
                )
                check_largest(self._client, self._values, self._keys)
        nbytes = sum(self._sizes)
        call = Put(
            **writing.names,  # type: ignore[arg-type]
            token=self._token,
            keys=list(self._keys),
            buckets=self._buckets,
            columns=self._columns,
            sizes=self._sizes,
            nbytes=nbytes,
            most_tags=self._most_tags,
            ttl_ms=self._index.ttl_ms,
        )
        nodes = by_node(self._client, [value.key for value in self._values])
        if set(nodes) <= {self._index.client} and nbytes <= CHUNK_BYTES:
            return self._index.request(
                call,
                *self._tags,
                before=(lambda made: made.add_values(self._values)) if self._values else None,
            )
        store(self._client, self._values)
        return self._index.request(call, *self._tags)

    def refused(self, writing: Writing, reply: Stored) -> None:
        """Delete the values that no row refers to, and prepare the next attempt.

        Raises:
            EncodeError: The tags of a row would be larger than the server or a file takes.
            ConfigError: The rows are more than the limits.
            StoreFull: There was no room in time.
        """
        if reply.outcome == "again":
            self.drop(reply.change - reply.count)
        elif reply.outcome != "forgotten":
            unlink(self._client, [value.key for value in self._values])
        if reply.outcome == "tags":
            row = f"row {self._keys[reply.count]!r}, with the tags that it has already,"
            self._check_tags(reply.nbytes, row)
            self._most_tags = reply.nbytes
        what = f"table {self._index.table!r}"
        if reply.outcome == "never":
            raise ConfigError(
                f"{what}: these rows alone are more than its limit or max_bytes: put fewer at once."
            )
        if reply.outcome == "columns":
            raise ConfigError(f"{what} would have more than {PAGES['columns']} columns.")
        if reply.outcome == "full":
            if writing.last:
                raise StoreFull(
                    f"{what} in namespace {self._index.namespace!r} is at its limit, and no rows "
                    "were cleared in time: clear rows that were trained, or raise limit or "
                    "max_bytes.",
                    task=self._index.table,
                    namespace=self._index.namespace,
                )
            here().log(f"{what}: a put waits for room", self._index.namespace)
            self._index.wait(writing.identity.name)

    def _check_tags(self, nbytes: int, row: str) -> None:
        if nbytes > MOST_TAGS:
            raise EncodeError(
                f"{row} would have {nbytes:,} bytes, and {MOST_TAGS:,} are the most: store large "
                "values as columns. Nothing was changed."
            )
        self._client.check_size(nbytes, row, "store large values as columns, or ")

    def drop(self, after: int | None = None) -> None:
        """Delete the values that no row refers to, nor a row that was cleared since."""
        if self._values:
            with Reading(f"the index of table {self._index.table!r}"):
                found = [row for row in self._index.find(self._keys) if row is not None]
                used = {place.key for row in found for place in row.places.values()}
            if after is not None:
                used.update(self._index.retained_values(after))
            unlink(self._client, [value.key for value in self._values if value.key not in used])
