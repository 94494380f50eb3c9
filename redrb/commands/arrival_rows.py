"""The rows that `redrb tail` prints: of fixed widths, as they come one by one."""

from __future__ import annotations

import time
from functools import cache
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.text import Text

from redrb.commands.group_screen import row

if TYPE_CHECKING:
    from redrb.browse import GroupView

_WIDTHS: Final = (
    ("id", 9),
    ("samples", 7),
    ("size", 9),
    ("version", 7),
    ("stale", 5),
    ("reward", 8),
)
_PLACES: Final = (0, 2, 3, 4, 5, 6)
"""Of the cells of `group_screen.row`."""


@cache
def _console() -> Console:
    return Console(highlight=False)


def head() -> None:
    """Print the names of the columns."""
    names = " ".join(f"{name:>{width}}" for name, width in _WIDTHS)
    _print(Text(f"{'time':8} {names} {'put/s':>7}  range, tags", style="bold"))


def line(view: GroupView, per_s: float) -> None:
    """Print the row of a group that arrived now."""
    cells = row(view)
    shown = Text(time.strftime("%H:%M:%S"))
    for place, (_, width) in zip(_PLACES, _WIDTHS, strict=True):
        cell = cells[place]
        shown.append(" " * (1 + max(width - cell.cell_len, 0))).append_text(cell)
    shown.append(f" {per_s:7.1f}  {cells[7].plain:9}")
    state = "" if cells[1].plain == "arrived" else cells[1].plain.removeprefix("arrived ")
    for text in (state, cells[8].plain):
        shown.append(f" {text}" if text else "", style=cells[1].style)
    _print(shown)


def _print(text: Text) -> None:
    console = _console()
    if console.is_terminal:
        text.truncate(console.width, overflow="ellipsis")
        console.print(text, no_wrap=True)
    else:
        print(text.plain.rstrip(), flush=True)
