"""Prints the results of commands: one line of JSON, or tables, sizes and ages for people."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Literal

from redrb.words import printable

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

_UNITS = ("kB", "MB", "GB", "TB")
_WIDEST = 1_000_000


def show(result: object, lines: Iterable[str | Table | Text], *, as_json: bool) -> None:
    """Print a result: as one line of JSON, or its lines and tables for people."""
    if as_json:
        print(json.dumps(_finite(result), default=str), flush=True)
        return
    for line in lines:
        print(printable(line) if isinstance(line, str) else _rendered(line), flush=True)


def figures(named: Mapping[str, object]) -> Iterator[str]:
    """Return a line for each figure: its name, then its value."""
    for name, value in named.items():
        yield f"{name:18} {value:,}" if type(value) is int else f"{name:18} {value!s}"


def rounded(named: Mapping[str, object]) -> dict[str, object]:
    """Return figures with two decimals."""
    return {name: f"{v:.2f}" if isinstance(v, float) else v for name, v in named.items()}


def table(
    head: Sequence[str],
    rows: Iterable[Iterable[str | Text]],
    left: Collection[str] = (),
    *,
    widths: Sequence[int] = (),
    headed: bool = True,
) -> Table:
    """Return a table: as wide as the terminal, or complete where there is none.

    Cells of the columns in `left` begin at the left; others end at the right. Where a terminal is
    too narrow, texts go on below themselves. Cells with a style stay on one line, and the last one
    is cut. `widths` are least widths, for a table that is printed part by part; `headed` says
    whether to print the names.
    """
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, pad_edge=False, padding=(0, 1), show_header=headed, header_style="")
    for name, width in zip_longest(head, widths):
        side: Literal["left", "right"] = "left" if name in left else "right"
        least = max(len(name), width or 0)
        grid.add_column(name, justify=side, overflow="fold", min_width=least)
    for row in rows:
        *cells, last = [Text(printable(cell)) if isinstance(cell, str) else cell for cell in row]
        for column, cell in zip(grid.columns, cells, strict=False):
            column.no_wrap = bool(cell.no_wrap)
        grid.add_row(*cells, last)
    return grid


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


def _rendered(shown: Table | Text) -> str:
    """Return what rich renders; rich itself would end the process when a pipe is closed."""
    from rich.console import Console
    from rich.text import Text

    # `--watch` counts characters itself, so only what is printed where it began has colours
    colours = sys.stdout is sys.__stdout__
    console = Console(highlight=False, color_system="auto" if colours else None)
    if not console.is_terminal:
        console.width = _WIDEST
    with console.capture() as printed:
        console.print(shown, soft_wrap=isinstance(shown, Text))
    return "\n".join(line.rstrip() for line in printed.get().removesuffix("\n").split("\n"))


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


def _finite(value: object) -> object:
    """Return what JSON can hold: differences of float64, and keys of tags, may be beyond it."""
    if isinstance(value, dict):
        return {
            repr(key) if isinstance(key, bytes) else key: _finite(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return list(map(_finite, value))
    return None if isinstance(value, float) and not math.isfinite(value) else value
