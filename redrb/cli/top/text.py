"""Text of a picture: what comes from Redis without control characters; numbers in few columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rich.text import Text

from redrb.cli.output import age
from redrb.words import printable

Part: TypeAlias = "str | tuple[str, str] | Text"
"""Words of a line: plain, with a style, or a line of such words."""

DIM = "dim"
GOOD = "green"
NOTE = "cyan"
WARN = "yellow"
BAD = "bold red"
HEAD = "bold"
_BARS = "▁▂▃▄▅▆▇█"


def line(*parts: Part) -> Text:
    """Return a line of words, without control characters."""
    made = Text(no_wrap=True)
    for part in parts:
        if isinstance(part, Text):
            made.append_text(part)
        elif isinstance(part, tuple):
            made.append(printable(part[0]), part[1])
        else:
            made.append(printable(part))
    return made


def cut(made: Text, width: int) -> Text:
    """Return a line that is at most `width` columns wide and has no control characters."""
    plain = printable(made.plain)
    if plain != made.plain:
        made = Text(plain, spans=made.spans, no_wrap=True)
    if made.cell_len > width:
        made = made.copy()
        made.truncate(width, overflow="ellipsis")
    return made


def wrapped(words: str, width: int) -> list[str]:
    """Return words in lines of at most `width` columns; a longer word is broken."""
    width, lines = max(1, width), [""]
    for word in printable(words).split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
        while len(lines[-1]) > width:
            lines[-1:] = [lines[-1][:width], lines[-1][width:]]
    return lines


def amount(number: float) -> str:
    """Return a count in at most seven columns, such as "99,999", "123k" or "1.2M"."""
    if number < 100_000:
        return f"{number:,.0f}"
    return _with_unit(number)


def _with_unit(number: float) -> str:
    for unit in ("k", "M", "G"):
        number /= 1000
        if number < 999.5:
            return f"{number:.0f}{unit}" if number >= 9.95 else f"{number:.1f}{unit}"
    return f"{number:.0f}G"


def short(number: float) -> str:
    """Return a count in at most four columns, such as "9999", "123k" or "1.2M"."""
    return f"{number:.0f}" if number < 9999.5 else _with_unit(number)


def rate(per_s: float | None) -> str:
    """Return a rate per second in at most five columns; "-" if it is not known."""
    if per_s is None:
        return "-"
    if per_s >= 9999.5:
        return short(per_s)
    if per_s >= 99.5:
        return amount(per_s)
    return f"{per_s:.1f}" if per_s >= 0.1 or not per_s else f"{per_s:.2f}"


def time_of(seconds: float) -> str:
    """Return a time, such as "0.4 s" or "12 min"."""
    return f"{seconds:.1f} s" if seconds < 10 else age(seconds)


def sparkline(values: Sequence[float | None], width: int) -> str:
    """Return values as bars from 0 to the largest one, the newest last.

    More values than columns share columns, which show their mean; None is an empty column.
    """
    if not values or width < 1:
        return ""
    per_column = -(-len(values) // width)
    first = len(values) % per_column
    parts = [values[:first]] if first else []
    parts += [values[at : at + per_column] for at in range(first, len(values), per_column)]
    known = [[value for value in part if value is not None] for part in parts]
    means = [sum(part) / len(part) if part else None for part in known]
    largest = max((mean for mean in means if mean is not None), default=0.0)
    scale = 7 / largest if largest > 0 else 0.0
    return "".join(" " if mean is None else _BARS[round(max(0.0, mean) * scale)] for mean in means)


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
