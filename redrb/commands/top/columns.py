"""A table as wide as the terminal: columns are left out by importance until it fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from redrb.commands.top.text import HEAD, cut, line

_GAP = 2
_MARK = 2
_NARROWEST = 8


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        name: Its heading.
        importance: Columns with a larger number are left out first; 0: it always stays.
        left: Whether its cells begin at the left; others end at the right.
        most: Its largest width.
    """

    name: str
    importance: int = 0
    left: bool = False
    most: int = 24


@dataclass(frozen=True)
class Table:
    """The lines of a table.

    Attributes:
        head: The line of headings.
        rows: A line for each row.
    """

    head: Text
    rows: list[Text]


def fitted(
    columns: Sequence[Column], rows: Sequence[Sequence[Text]], width: int | None, marked: int = -1
) -> Table:
    """Return a table of at most `width` columns of the terminal.

    Args:
        columns: Its columns; the first one stands for the row.
        rows: Cells of each row.
        width: Columns of the terminal; None: as wide as the table is.
        marked: Number of the row that is selected; -1: none.
    """
    shown = [
        number
        for number, column in enumerate(columns)
        if not column.importance or any(row[number].plain for row in rows)
    ]
    widths = {number: _width_of(columns[number], rows, number, width) for number in shown}
    if width is not None:
        _leave_out(columns, shown, widths, width)
    heads = [line((columns[number].name, HEAD)) for number in range(len(columns))]
    lines = [_joined("  ", columns, shown, widths, heads)]
    for place, row in enumerate(rows):
        mark = "> " if place == marked else "  "
        made = _joined(mark, columns, shown, widths, row)
        if place == marked:
            made.stylize("reverse", 0, len(mark) + len(row[shown[0]].plain))
        lines.append(made)
    return Table(lines[0], lines[1:])


def rows_within(table: Table, room: int, marked: int) -> list[Text]:
    """Return the heading and as many rows as there is room for, with the selected one."""
    if room < 1:
        return []
    count = room - 1
    if count >= len(table.rows):
        return [table.head, *table.rows]
    if count < 2:
        return [table.head, *table.rows[marked : marked + count]]
    count -= 1  # the last line says how many are hidden
    first = max(0, min(marked - count // 2, len(table.rows) - count))
    hidden = len(table.rows) - count
    more = line((f"    {hidden:,} more (arrows)", "dim"))
    return [table.head, *table.rows[first : first + count], more]


def _width_of(
    column: Column, rows: Sequence[Sequence[Text]], number: int, width: int | None
) -> int:
    """Return the width of a column's longest cell, within its largest width."""
    longest = max([row[number].cell_len for row in rows], default=0)
    heading = line(column.name).cell_len
    return max(heading, longest if width is None else min(longest, column.most))


def _leave_out(
    columns: Sequence[Column], shown: list[int], widths: dict[int, int], width: int
) -> None:
    """Leave columns out until the table fits; then make the first column narrower."""

    def wide() -> int:
        return _MARK + sum(widths[number] for number in shown) + _GAP * (len(shown) - 1)

    while wide() > width:
        least = max(shown, key=lambda number: (columns[number].importance, number))
        if not columns[least].importance:
            break
        shown.remove(least)
    widths[shown[0]] = max(_NARROWEST, widths[shown[0]] - max(0, wide() - width))


def _joined(
    mark: str,
    columns: Sequence[Column],
    shown: Sequence[int],
    widths: dict[int, int],
    cells: Sequence[Text],
) -> Text:
    made = Text(mark, no_wrap=True)
    for place, number in enumerate(shown):
        cell = cut(cells[number], widths[number])
        spare = " " * (widths[number] - cell.cell_len)
        made.append(" " * _GAP if place else "")
        if columns[number].left:
            made.append_text(cell)
            made.append(spare if place < len(shown) - 1 else "")
        else:
            made.append(spare)
            made.append_text(cell)
    return made
