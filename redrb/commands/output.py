"""Prints the results of commands: one line of JSON, or tables, sizes and ages for people."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

_UNITS = ("kB", "MB", "GB", "TB")
_WIDEST = 1_000_000


def show(result: object, lines: Iterable[str], *, as_json: bool) -> None:
    """Print a result: as one line of JSON, or its lines for people."""
    for line in [json.dumps(_finite(result), default=str)] if as_json else map(printable, lines):
        print(line, flush=True)


def printable(text: str) -> str:
    """Return a text with U+FFFD for each control character: a terminal would obey these.

    Names and messages from Redis may hold them. Characters that change the direction of text, and
    line breaks, count too.
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text)


def printable_lines(text: str) -> str:
    """Return a text of several lines, such as a message, with each of its lines printable."""
    return "\n".join(map(printable, text.split("\n")))


def figures(named: Mapping[str, object]) -> Iterator[str]:
    """Return a line for each figure: its name, then its value."""
    for name, value in named.items():
        yield f"{name:18} {value:,}" if type(value) is int else f"{name:18} {value!s}"


def rounded(named: Mapping[str, object]) -> dict[str, object]:
    """Return figures with two decimals."""
    return {name: f"{v:.2f}" if isinstance(v, float) else v for name, v in named.items()}


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[str] = ()
) -> list[str]:
    """Return the lines of a table: as wide as the terminal, or complete where there is none.

    Cells of the columns in `left` begin at the left; others end at the right.
    """
    from rich.text import Text

    console = _console(colours=False)  # `show` lets no escape codes through
    cells = ((Text(printable(cell)) for cell in row) for row in rows)
    with console.capture() as printed:
        console.print(_grid(head, cells, left))
    return [line.rstrip() for line in printed.get().splitlines()]


def print_table(
    head: Sequence[str],
    rows: Iterable[Iterable[Text]],
    left: Collection[str] = (),
    *,
    widths: Sequence[int] = (),
    headed: bool = True,
) -> None:
    """Print a table whose cells have styles, one line a row: a terminal cuts the last column.

    Columns in `left` begin at the left; `widths` are least widths, for a table that is printed part
    by part; `headed` says whether to print the names.
    """
    cells = [[*row] for row in rows]
    console = _console(colours=_is_terminal())
    least = widths or [len(name) for name in head]
    others = [
        max(least[place], *(row[place].cell_len for row in cells)) for place in range(len(head) - 1)
    ]
    left_over = console.width - sum(others) - 2 * len(others)
    for row in cells:
        row[-1].truncate(max(left_over, len(head[-1])), overflow="ellipsis")
    grid = _grid(head, cells, left)
    grid.show_header = headed
    for column, width in zip(grid.columns, least, strict=True):
        column.min_width = width
    _write(console, grid)


def print_lines(lines: Iterable[Text], *, gap: bool) -> None:
    """Print lines with styles, whole; `gap`: below an empty line."""
    console = _console(colours=_is_terminal())
    if gap:
        print()
    for line in lines:
        _write(console, line)


def check_reader() -> None:
    """Check that somebody reads the output, for a command that may have nothing to write for long.

    Raises:
        BrokenPipeError: The reader has ended, such as `head`.
    """
    import select

    try:
        output = sys.stdout.fileno()
    except ValueError:  # not a file
        return
    poll = select.poll()
    poll.register(output, 0)
    if any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
        raise BrokenPipeError


def _write(console: Console, shown: Table | Text) -> None:
    """Print what rich renders; rich itself would end the process when a pipe is closed."""
    from rich.text import Text

    with console.capture() as printed:
        console.print(shown, soft_wrap=isinstance(shown, Text))
    print(printed.get(), end="", flush=True)


def _is_terminal() -> bool:
    """Return whether this process prints where it began to: `--watch` counts characters itself."""
    return sys.stdout is sys.__stdout__


def _console(*, colours: bool) -> Console:
    """Return a console that is as wide as the terminal, or as any line where there is none."""
    from rich.console import Console

    console = Console(highlight=False, color_system="auto" if colours else None)
    if not console.is_terminal:
        console.width = _WIDEST
    return console


def _grid(head: Sequence[str], rows: Iterable[Iterable[Text]], left: Collection[str]) -> Table:
    from rich.table import Table

    grid = Table(box=None, pad_edge=False, padding=(0, 1))
    for name in head:
        grid.add_column(name, justify="left" if name in left else "right", overflow="fold")
    for row in rows:
        grid.add_row(*row)
    return grid


def size(nbytes: int) -> str:
    """Return a number of bytes as people read it, such as "503.3 MB"."""
    if nbytes < 1000:
        return f"{nbytes} B"
    amount, unit = nbytes / 1000, 0
    while amount >= 999.95 and unit < len(_UNITS) - 1:
        amount, unit = amount / 1000, unit + 1
    return f"{amount:.1f} {_UNITS[unit]}"


def age(seconds: float) -> str:
    """Return how long ago something was, such as "12 s" or "3.5 h"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86_400:.1f} d"


def percent(part: float, whole: float) -> str:
    """Return a share, such as "1.25%"."""
    share = 100 * part / whole if whole else 0.0
    return f"{share:.2f}%" if share >= 0.01 or not share else "<0.01%"


def counted(number: int, noun: str) -> str:
    """Return a number of things, such as "1 tensor" or "2,000 tensors"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _finite(value: object) -> object:
    """Return what JSON can hold: differences of float64 may be beyond it."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return list(map(_finite, value))
    return None if isinstance(value, float) and not math.isfinite(value) else value
