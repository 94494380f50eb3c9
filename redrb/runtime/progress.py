"""Progress bars of loops, on rank 0 and only on a terminal."""

from __future__ import annotations

from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from redrb.runtime.checkpoint import Position
from redrb.runtime.world import rank_here


class ProgressBar:
    """One bar; used as a context manager."""

    def __init__(self, label: str, total: int | None, *, done: int = 0) -> None:
        """Show how far a loop is.

        Args:
            label: Word before the bar, such as "train".
            total: Number of steps; None if it is not known.
            done: Number of steps already done.
        """
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=rank_here() != 0 or not console.is_terminal,
            transient=True,
        )
        self._label = label
        self._bar = self._progress.add_task(label, total=total, completed=done)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def advance(self, position: Position | None = None) -> None:
        """Count one more step; `position` shows a trainer's episode and epoch in the label."""
        label = self._label
        if position is not None:
            label = f"{self._label} episode {position.episode} epoch {position.epoch}"
        self._progress.update(self._bar, advance=1, description=label)
