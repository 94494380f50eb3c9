"""`Reader`: reads columns of rows, all from one moment of each row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from redrb.connection import Client
from redrb.errors import MissingRows, StoreError
from redrb.table.index import Index, Row
from redrb.table.payload import Wanted, read
from redrb.table.rows import Rows
from redrb.table.values import Values
from redrb.unpacking import Reading

MOST_LOOKS: Final = 100
"""Looks at rows of which others are replaced all the time, in one call."""


class Reader:
    """Reads columns of a table's rows.

    A row's record in the index says where its values lie. A put or `clear` may replace them before
    they are read: then the record is read again.
    """

    def __init__(self, client: Client, index: Index, values: Values) -> None:
        self._client, self._index, self.values = client, index, values

    def get(self, row_keys: tuple[str, ...], columns: Sequence[str] | None) -> Rows:
        """Return columns of rows; arguments and errors are those of `Table.get`."""
        gone: set[str] = set()
        for _ in range(MOST_LOOKS):
            found = self._index.find(row_keys)
            missing = tuple(key for key, row in zip(row_keys, found, strict=True) if row is None)
            if missing:
                raise MissingRows(self._index.table, missing)
            rows = [row for row in found if row is not None]
            with Reading(f"the index of table {self._index.table!r}"):
                names = _common(rows) if columns is None else tuple(columns)
                places = [row.places(names) for row in rows]
            for at, name in enumerate(names):
                lacking = tuple(
                    key for key, of_row in zip(row_keys, places, strict=True) if of_row[at] is None
                )
                if lacking:
                    raise MissingRows(self._index.table, lacking, (name,))
            lacking_before, gone = gone, set()
            cells = self._read(places, len(names), gone)
            if not gone:
                return Rows(row_keys, dict(zip(names, cells, strict=True)), self.values)
            if gone & lacking_before:
                break
        raise StoreError(
            f"table {self._index.table!r}: values of rows such as {row_keys[0]!r} are gone from "
            "Redis, although their rows are there: a server has lost or evicted keys. Clear these "
            "rows."
        )

    @Reading("the index of a table")
    def _read(
        self, places: Sequence[Sequence[Any]], columns: int, gone: set[str]
    ) -> list[list[memoryview]]:
        """Return columns of rows; add the keys of values that were replaced or cleared."""
        ranges: dict[str, list[int]] = {}  # of each string: begin, end, bytes of all of it
        for of_row in places:
            for key, nbytes, begin, length in of_row:
                known = ranges.get(key)
                if known is None:
                    ranges[key] = [begin, begin + length, nbytes]
                else:
                    known[0], known[1] = min(known[0], begin), max(known[1], begin + length)
        wanted = [
            Wanted(key, begin, end - begin, end - begin == nbytes)
            for key, (begin, end, nbytes) in ranges.items()
        ]
        views = {}
        for one, part in zip(wanted, read(self._client, wanted), strict=True):
            if part is None:
                gone.add(one.key)
            views[one.key] = memoryview(part or b""), one.begin
        found: list[list[memoryview]] = [[] for _ in range(columns)]
        for of_row in places:
            for column, (key, _, begin, length) in zip(found, of_row, strict=True):
                view, first = views[key]
                column.append(view[begin - first : begin - first + length])
        return found


def _common(rows: Sequence[Row]) -> tuple[str, ...]:
    """Return the columns that all rows have."""
    if not rows:
        return ()
    names = [set(row.names) for row in rows]
    return tuple(name for name in rows[0].names if all(name in each for each in names))
