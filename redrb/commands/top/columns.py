"""A table as wide as the terminal: its width decides which columns it has, and no figure does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from redrb.commands.top.text import HEAD, cut, line

_GAP = 2
_INDENT = 2
_NARROWEST = 8


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        width: Its width on a terminal. Where the terminal is wider than all columns, the first one
            grows; then the last one, if its cells begin at the left.
        importance: Columns with a larger number are left out first; 0: it always stays.
    """

    name: str
    width: int
    importance: int = 0
    left: bool = False


def fitted(
    columns: Sequence[Column], rows: Sequence[Sequence[Text]], width: int | None
) -> list[Text]:
    """Return the lines of a table, headings first, of at most `width` columns of the terminal.

    The first column stands for the row; without `width` it is as wide as the table is.
    """
    needs = [
        max([line(column.name).cell_len, *(row[number].cell_len for row in rows)])
        for number, column in enumerate(columns)
    ]
    widths = dict(enumerate(needs))
    if width is not None:
        widths = _spread(columns, _within(columns, width), needs, width)
    heads = [line((columns[number].name, HEAD)) for number in range(len(columns))]
    return [_joined(columns, widths, row) for row in [heads, *rows]]


def _within(columns: Sequence[Column], width: int) -> list[int]:
    """Return the numbers of the columns that fit."""
    shown = [*range(len(columns))]
    while _INDENT + sum(columns[each].width + _GAP for each in shown) - _GAP > width:
        least = max(shown, key=lambda number: (columns[number].importance, number))
        if not columns[least].importance:
            break
        shown.remove(least)
    return shown


def _spread(
    columns: Sequence[Column], shown: Sequence[int], needs: Sequence[int], width: int
) -> dict[int, int]:
    """Return the widths of columns; the first, then the last, is narrower if it has to be."""
    widths = {number: columns[number].width for number in shown}
    spare = width - _INDENT - sum(widths.values()) - _GAP * (len(shown) - 1)
    first, last = shown[0], shown[-1]
    least = {first: _NARROWEST} | ({last: 1} if columns[last].left and last != first else {})
    for number, narrowest in least.items():
        more = min(spare, max(0, needs[number] - widths[number]))
        more = max(more, narrowest - widths[number])
        widths[number] += more
        spare -= more
    return widths


def _joined(columns: Sequence[Column], widths: dict[int, int], cells: Sequence[Text]) -> Text:
    made = Text(" " * _INDENT, no_wrap=True)
    for place, (number, width) in enumerate(widths.items()):
        cell = cut(cells[number], width)
        spare = " " * (width - cell.cell_len)
        made.append(" " * _GAP if place else "")
        if columns[number].left:
            made.append_text(cell)
            made.append(spare if place < len(widths) - 1 else "")
        else:
            made.append(spare)
            made.append_text(cell)
    return made
