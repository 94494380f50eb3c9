"""Shows the progress of a run: a panel on a terminal, lines elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from redrb.launch.history import History
from redrb.launch.job import Job
from redrb.launch.supervisor import Shown
from redrb.launch.worker_rows import workers_table
from redrb.stream import StreamStats

LINE_EVERY_S = 5.0
"""Seconds between lines if the output is not a terminal."""

LEAST_WORKERS = 3
"""Least rows for workers, on a low terminal too."""

OTHER_ROWS = 11
"""Rows of the panel beside those of workers and of faults, and the line of the prompt."""

MOST_FAULTS = 2
"""Most faults on the screen; the report has all of them."""

FAULT_LETTERS = 180
"""Most letters of a fault on the screen."""

FAULT_COLUMNS = 60
"""Columns for the text of a fault on a terminal of 80."""

_BARS = "▁▂▃▄▅▆▇█"


class Screen:
    """Redraws one panel on a terminal; prints a line every few seconds elsewhere."""

    def __init__(self, console: Console, job: Job) -> None:
        self._console = console
        self._job = job
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._printed_at = -LINE_EVERY_S

    def __enter__(self) -> Screen:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def show(
        self,
        seconds: float,
        history: History,
        stats: StreamStats | None,
        processes: Sequence[Shown] = (),
    ) -> None:
        """Show the state of the run.

        Args:
            seconds: Seconds of this run.
            history: Events of its workers.
            stats: Counters of its task; None while they are not known.
            processes: Its server and workers.
        """
        if self._console.is_terminal:
            height = self._console.height
            picture = _panel(seconds, history, stats, self._job, processes, height=height)
            self._live.update(picture, refresh=True)
        elif seconds - self._printed_at >= LINE_EVERY_S:
            self._printed_at = seconds
            self._console.print(_line(seconds, history, stats), soft_wrap=True, highlight=False)


def _panel(
    seconds: float,
    history: History,
    stats: StreamStats | None,
    job: Job,
    processes: Sequence[Shown] = (),
    *,
    height: int = 24,
) -> Panel:
    """Return the picture of a run.

    Args:
        seconds: Seconds of this run.
        history: Events of its workers.
        stats: Counters of its task; None while they are not known.
        job: The job.
        processes: Its server and workers.
        height: Rows of the terminal.
    """
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column(min_width=34)
    grid.add_row("reward", _reward(history.reward_last, job.recipe.target_reward))
    grid.add_row("", _sparkline([value for _, value in history.rewards]))
    trained = f"({history.samples:,} trained{_quiet(history)})"
    grid.add_row("samples / s", f"{history.rate:,.0f}   {trained}")
    newest = history.staleness_newest
    stale = f"mean {newest[0]:.1f}, max {newest[1]:.0f} versions" if newest else "..."
    grid.add_row("staleness", stale)
    grid.add_row("weight version", str(history.weight_version))
    makers = history.maker_admission_share + history.maker_room_share
    waits = f"{history.trainer_wait_share:.1%} for data, makers {makers:.0%} for it"
    grid.add_row("trainer waited", waits)
    if stats is not None:
        grid.add_row("groups", _groups(stats))
    faults = _faults_shown(history)
    for number, text in enumerate(faults):
        grid.add_row("" if number else "filtered", Text(text, style="red"))
    title = f"{job.title}  ·  {job.workers}  ·  {seconds:.0f} s"
    of_faults = sum(1 + len(text) // FAULT_COLUMNS for text in faults)
    rows = max(LEAST_WORKERS, height - OTHER_ROWS - of_faults)
    parts = Group(grid, "", workers_table(processes, history, rows))
    return Panel(parts, title=title, title_align="left", border_style="cyan", expand=False)


def _faults_shown(history: History) -> list[str]:
    """Return the faults that cost most groups, as texts."""
    costliest = history.costliest_faults[:MOST_FAULTS]
    return [f"{fault.groups:,} groups: {fault.why:.{FAULT_LETTERS}}" for fault in costliest]


def _line(seconds: float, history: History, stats: StreamStats | None) -> str:
    reward = history.reward_last
    newest = history.staleness_newest
    stale = f"{newest[0]:.1f} (max {newest[1]:.0f})" if newest else "..."
    return (
        f"{seconds:5.0f} s  reward {'  ... ' if reward is None else f'{reward:.3f}'}"
        f"  {history.rate:6,.0f} samples/s{_quiet(history)}"
        f"  staleness {stale}  weights v{history.weight_version}  {_groups(stats) if stats else ''}"
    ).rstrip()


def _quiet(history: History) -> str:
    """Return for how long no step came; "" while steps come."""
    quiet_s = history.quiet_s
    return f", no step for {quiet_s:.0f} s" if quiet_s else ""


def _groups(stats: StreamStats) -> str:
    """Return the groups that a user watches: many filtered ones mean that rewards are wrong."""
    ledger = stats.ledger
    filtered = f", {ledger.filtered:,} filtered" if ledger.filtered else ""
    return f"{ledger.waiting:,} waiting, {ledger.leased:,} leased{filtered}"


def _reward(reward: float | None, target: float) -> Table | str:
    """Return a reward as a number, with a bar if there is a target to reach."""
    if reward is None:
        return "..."
    if not 0 < target < math.inf:
        return f"{reward:.3f}"
    figures = Table.grid(padding=(0, 1))
    done = min(1.0, max(0.0, reward / target))
    bar = ProgressBar(total=1.0, completed=done, width=24, complete_style="cyan")
    figures.add_row(bar, f"{reward:.3f}", Text(f"of {target:.2f}", style="dim"))
    return figures


def _sparkline(values: list[float]) -> str:
    """Return the newest values as bars, between 0 and 1 if all lie there."""
    newest = values[-32:]
    least, most = min([0.0, *newest]), max([1.0, *newest])
    return "".join(_BARS[min(7, int((value - least) / (most - least) * 8))] for value in newest)
