"""`StageEvents`: reports each batch of a stage as an event."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from redrb.metrics.events import Write


class StageEvents:
    """Writes an event `stage` for each batch: its groups, and the seconds of each part of the work.

    The event has `groups` (forwarded), `filtered`, `failed`, `wait_for_batch_s`, `function_s` and
    `forward_s`. A batch whose lease was lost is the event `stage_lost`.
    """

    def __init__(self, write: Write | None) -> None:
        """Write events by a function; None: write nothing."""
        self._write = write
        self._figures: Counter[str] = Counter()
        self._seconds: dict[str, float] = {}
        self._batches = 0

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the time of a block to the batch."""
        began = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - began
            self._seconds[name] = self._seconds.get(name, 0.0) + spent

    def count(self, name: str, groups: int) -> None:
        """Add groups of the batch that are not forwarded."""
        self._figures[name] += groups

    def end(self, groups: int) -> None:
        """Write the batch, which had so many groups."""
        filtered, failed = self._figures["filtered"], self._figures["failed"]
        figures = {"groups": groups - filtered - failed, "filtered": filtered, "failed": failed}
        self._report("stage", {**figures, **self._seconds})

    def lost(self) -> None:
        """Write that the lease of the batch was lost: another stage has its groups."""
        self._report("stage_lost", {})

    def _report(self, event: str, values: dict[str, float]) -> None:
        self._batches += 1
        self._figures.clear()
        self._seconds = {}
        if self._write is not None:
            self._write(event, step=self._batches, **values)
