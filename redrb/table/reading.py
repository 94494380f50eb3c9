"""`Reader`: reads columns of rows, all from one moment of each row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from redrb.connection import Client
from redrb.errors import ConfigError, MissingRows, StoreError
from redrb.keys import check_name
from redrb.table.index import Index, Layout, Row
from redrb.table.payload import Wanted, read
from redrb.table.rows import Cells, Rows
from redrb.table.values import Values
from redrb.unpacking import Reading

MOST_LOOKS: Final = 100
"""Looks at rows of which others are replaced all the time, in one call."""


def checked_columns(columns: object) -> list[str]:
    """Return names of columns; raises ConfigError for others, and for a text."""
    if isinstance(columns, str | bytes) or not isinstance(columns, Iterable):
        raise ConfigError(f"columns={columns!r:.80}: give the names of columns.")
    return [check_name("column", name) for name in columns]


class Reader:
    """Reads columns of a table's rows.

    A row's record in the index says where its values lie. A put or `clear` may replace them before
    they are read: then the record is read again.
    """

    def __init__(self, client: Client, index: Index, values: Values) -> None:
        self._client, self._index, self.values = client, index, values

    def get(self, row_keys: tuple[str, ...], columns: Sequence[str] | None) -> Rows:
        """Return columns of rows; arguments and errors are those of `Table.get`."""
        names = None if columns is None else checked_columns(columns)
        gone: set[str] = set()
        for _ in range(MOST_LOOKS):
            found = self._index.find(row_keys)
            missing = tuple(key for key, row in zip(row_keys, found, strict=True) if row is None)
            if missing:
                raise MissingRows(self._index.table, missing)
            rows = [row for row in found if row is not None]
            with Reading(f"the index of table {self._index.table!r}"):
                plan = _Plan(rows, names)
            for name in plan.lacking:
                without = tuple(
                    key
                    for key, row in zip(row_keys, rows, strict=True)
                    if name in plan.places[row.layout].lacking
                )
                raise MissingRows(self._index.table, without, (name,))
            lacking_before, gone = gone, set()
            cells = self._read(rows, plan, gone)
            if not gone:
                return Rows(row_keys, dict(zip(plan.names, cells, strict=True)), self.values)
            if gone & lacking_before:
                break
        raise StoreError(
            f"table {self._index.table!r}: values of rows such as {row_keys[0]!r} are gone from "
            "Redis, although their rows are there: a server has lost or evicted keys. Clear these "
            "rows."
        )

    @Reading("the index of a table")
    def _read(self, rows: Sequence[Row], plan: _Plan, gone: set[str]) -> list[Cells]:
        """Return columns of rows; add the keys of values that were replaced or cleared."""
        wanted: list[Wanted] = []
        numbers: list[list[int]] = []  # of the strings in `wanted`, by row
        begins: list[list[int]] = []
        lengths: list[list[int]] = []
        for row in rows:
            places = plan.places[row.layout]
            at = len(wanted)
            starts: list[int] = []
            sizes: list[int] = []
            for string, first, end in places.strings:
                key, nbytes = row.stored(string)
                window = nbytes[first:end]
                length = sum(window)
                whole = not first and end == len(nbytes)
                wanted.append(Wanted(key, sum(nbytes[:first]), length, whole))
                starts += accumulate(window, initial=0)  # one more, which no cell refers to
                sizes += window
                sizes.append(0)
            numbers.append([at + each for each in places.numbers])
            begins.append([starts[each] for each in places.cells])
            lengths.append([sizes[each] for each in places.cells])
        parts = read(self._client, wanted)
        if None in parts:
            gone.update(one.key for one, part in zip(wanted, parts, strict=True) if part is None)
            return []
        if not rows:
            return [Cells((), (), ())] * len(plan.names)
        by_column = (zip(*of_rows, strict=True) for of_rows in (numbers, begins, lengths))
        return [
            Cells(tuple([parts[each] for each in of_column]), *where)
            for of_column, *where in zip(*by_column, strict=True)
        ]


@dataclass
class _Places:
    """Where the wanted columns lie in rows of one layout.

    Attributes:
        lacking: Those of them that such rows lack.
        strings: Which strings of a row hold them, and the first and the end of their columns.
        numbers, cells: Of each wanted column the number in `strings`, and the place among all
            columns between their firsts and ends, where one place follows those of each string.
    """

    lacking: set[str]
    strings: list[tuple[int, int, int]]
    numbers: list[int]
    cells: list[int]

    @classmethod
    def of(cls, layout: Layout, columns: Mapping[str, int]) -> _Places:
        wanted = set(columns.values())
        strings: list[tuple[int, int, int]] = []
        where: dict[int, tuple[int, int]] = {}
        before = 0
        for string, inside in enumerate(layout):
            there = [place for place, column in enumerate(inside) if column in wanted]
            if there:
                first, end = there[0], there[-1] + 1
                for place in there:
                    where[inside[place]] = len(strings), before + place - first
                before += end - first + 1
                strings.append((string, first, end))
        lacking = {name for name, column in columns.items() if column not in where}
        found = [where[column] for column in columns.values() if column in where]
        return cls(lacking, strings, [each for each, _ in found], [each for _, each in found])


class _Plan:
    """Which columns are read, and where they lie.

    Attributes:
        places: Where they lie in rows of each layout.
        lacking: Those that some rows lack.
    """

    def __init__(self, rows: Sequence[Row], names: Sequence[str] | None) -> None:
        """Plan to read columns, or those that all rows have."""
        layouts = {row.layout for row in rows}
        ids = rows[0].ids if rows else {}
        if names is None:
            there = [{column for string in layout for column in string} for layout in layouts]
            names = [name for name, column in ids.items() if all(column in each for each in there)]
        columns = {name: ids.get(name, -1) for name in names}
        self.names = tuple(columns)
        self.places = {layout: _Places.of(layout, columns) for layout in layouts}
        lacking = {name for places in self.places.values() for name in places.lacking}
        self.lacking = [name for name in columns if name in lacking]
