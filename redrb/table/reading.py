"""`Reader`: reads columns of rows, all from one moment of each row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from redrb.connection import Client
from redrb.errors import MissingRows, StoreError
from redrb.table.index import Index, Row
from redrb.table.payload import Wanted, read
from redrb.table.rows import Rows
from redrb.table.values import Values

MOST_LOOKS: Final = 10
"""Looks at rows whose values are gone, in one call, after which they are lost."""


class Reader:
    """Reads columns of a table's rows.

    A row's record in the index says where its values lie. A put or `clear` may replace them before
    they are read: then the record is read again.
    """

    def __init__(self, client: Client, index: Index, values: Values) -> None:
        self._client, self._index, self.values = client, index, values

    def get(self, row_keys: tuple[str, ...], columns: Sequence[str] | None) -> Rows:
        """Return columns of rows; arguments and errors are those of `Table.get`."""
        for _ in range(MOST_LOOKS):
            found = self._index.find(row_keys)
            missing = tuple(key for key, row in zip(row_keys, found, strict=True) if row is None)
            if missing:
                raise MissingRows(self._index.table, missing)
            rows = [row for row in found if row is not None]
            names = _common(rows) if columns is None else tuple(columns)
            for name in names:
                lacking = [
                    key for key, row in zip(row_keys, rows, strict=True) if name not in row.columns
                ]
                if lacking:
                    raise MissingRows(self._index.table, tuple(lacking), (name,))
            cells = self._read(rows, names)
            if cells is not None:
                return Rows(row_keys, dict(zip(names, cells, strict=True)), self.values)
        raise StoreError(
            f"table {self._index.table!r}: values of rows such as {row_keys[0]!r} are gone from "
            "Redis, although their rows are there: a server has lost or evicted keys. Clear these "
            "rows."
        )

    def _read(self, rows: Sequence[Row], names: Sequence[str]) -> list[list[memoryview]] | None:
        """Return the columns of rows; None if values were replaced or cleared meanwhile."""
        wanted: list[Wanted] = []
        places: list[dict[str, int]] = []  # of each row: string -> number in `wanted`
        for row in rows:
            of_row: dict[str, int] = {}
            strings: dict[str, list[str]] = {}
            for name in names:
                strings.setdefault(row.columns[name].key, []).append(name)
            for key, inside in strings.items():
                cells = [row.columns[name] for name in inside]
                begin = min(cell.begin for cell in cells)
                length = max(cell.begin + cell.length for cell in cells) - begin
                of_row[key] = len(wanted)
                wanted.append(Wanted(key, begin, length, length == cells[0].nbytes))
            places.append(of_row)
        parts = read(self._client, wanted)
        if None in parts:
            return None
        views = [memoryview(part) for part in parts if part is not None]
        found = []
        for name in names:
            column = []
            for row, of_row in zip(rows, places, strict=True):
                cell = row.columns[name]
                number = of_row[cell.key]
                begin = cell.begin - wanted[number].begin
                column.append(views[number][begin : begin + cell.length])
            found.append(column)
        return found


def _common(rows: Sequence[Row]) -> tuple[str, ...]:
    """Return the columns that all rows have, in the order of the first one."""
    if not rows:
        return ()
    return tuple(name for name in rows[0].columns if all(name in row.columns for row in rows))
