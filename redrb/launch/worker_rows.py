"""The rows of a run's workers on the screen: state, process id, newest event or reason."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from redrb.launch.history import History
from redrb.launch.job import TRAINER
from redrb.launch.supervisor import SERVER, Shown, State


def workers_table(processes: Sequence[Shown], history: History, rows: int) -> Table:
    """Return a row for each worker, and for a server that does not run.

    Args:
        processes: Server and workers.
        history: Has their newest events.
        rows: Most rows; the last one counts the workers that are left out, and workers that do not
            run come before those that do.
    """
    table = Table.grid(padding=(0, 2))
    for style in ("dim", "", "dim"):
        table.add_column(style=style, no_wrap=True)
    table.add_column()  # the only one that is narrowed on a small terminal
    known = [each for each in processes if each.name != SERVER or each.state is not State.RUNNING]
    chosen = known
    if len(known) > rows:
        important = sorted(known, key=lambda each: (each.name != TRAINER, _runs(each)))
        chosen = important[: rows - 1]
        chosen = [each for each in known if each in chosen]
    for each in chosen:
        table.add_row(each.name, _state(each), str(each.pid or "-"), _newest(each, history))
    left_out = len(known) - len(chosen)
    if left_out:
        running = sum(map(_runs, known)) - sum(map(_runs, chosen))
        table.add_row(f"{left_out} more", f"{running} running", "", "")
    return table


def _runs(process: Shown) -> bool:
    return process.state is State.RUNNING


def _state(process: Shown) -> Text:
    if process.state is State.WAITING and process.why:
        return Text(f"restart in {math.ceil(process.restart_in_s)} s", style="yellow")
    text, style = {
        State.RUNNING: ("running", "green"),
        State.WAITING: ("starting", "dim"),
        State.DONE: ("ended", "dim"),
        State.GIVEN_UP: ("given up", "red"),
    }[process.state]
    return Text(text, style=style)


def _newest(process: Shown, history: History) -> Text:
    """Return how a process ended, or its newest event and the seconds since then."""
    if process.why:
        return _line_of(process.why, "red" if process.state is State.GIVEN_UP else "yellow")
    newest = history.newest.get(process.name)
    if newest is None:
        return _line_of("no event yet", "dim")
    return _line_of(f"{newest.text}, {max(0.0, time.time() - newest.time):.0f} s ago")


def _line_of(text: str, style: str = "") -> Text:
    """Return a text that is cut off, and not wrapped."""
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")
