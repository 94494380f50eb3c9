"""Progress bars of loops, on rank 0 and on a terminal; elsewhere nothing is written."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from redrb.runtime.checkpoint import Position
from redrb.runtime.world import rank_here


class Progress:
    """One bar; used as a context manager."""

    def __init__(self, what: str, total: int | None, *, done: int = 0) -> None:
        """Show how far `what` is.

        Args:
            what: What is counted, such as "train".
            total: How many there will be; None: nobody knows.
            done: How many are done already.
        """
        console = Console(stderr=True)
        self._shown = rank_here() == 0 and console.is_terminal
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not self._shown,
            transient=True,
        )
        self._what = what
        self._task = self._bars.add_task(what, total=total, completed=done)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bars.stop()

    def advance(self, position: Position | None = None) -> None:
        """Count one more; tells the episode and epoch of a trainer."""
        told = self._what
        if position is not None:
            told = f"{self._what} episode {position.episode} epoch {position.epoch}"
        self._bars.update(self._task, advance=1, description=told)
