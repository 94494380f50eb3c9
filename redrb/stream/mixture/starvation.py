"""Which tasks starve a mixture: how long its takes waited for each."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Starvation:
    """How a mixture has waited for one task.

    Attributes:
        short: Takes that found too few groups of the task.
        waited_s: Seconds that these takes waited for it, together.
        waiting_s: Seconds for which a take has been waiting for it now; 0 when none does.
    """

    short: int
    waited_s: float
    waiting_s: float


@dataclass(frozen=True, slots=True)
class Waiting:
    """What a take waits for now: since when, by the monotonic clock, and for how many groups."""

    task: str
    share: int
    since: float


class Shortages:
    """How the takes of one mixture have waited.

    Attributes:
        now: What its take waits for; None: it does not wait.
    """

    def __init__(self) -> None:
        self._short: Counter[str] = Counter()
        self._waited_s: dict[str, float] = {}
        self.now: Waiting | None = None

    def add(self, task: str) -> None:
        """Note that a take found too few groups of a task."""
        self._short[task] += 1

    @contextmanager
    def waiting(self, task: str, share: int) -> Iterator[None]:
        """Count the time in this block as waiting for groups of a task."""
        self.now = now = Waiting(task, share, time.monotonic())
        try:
            yield
        finally:
            self.now = None
            waited_s = self._waited_s.get(task, 0.0) + time.monotonic() - now.since
            self._waited_s[task] = waited_s

    def of(self, task: str) -> Starvation:
        """Return how takes have waited for a task."""
        now = self.now
        waiting_s = time.monotonic() - now.since if now is not None and now.task == task else 0.0
        return Starvation(self._short[task], self._waited_s.get(task, 0.0), waiting_s)
