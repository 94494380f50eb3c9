"""`Rate`: the samples a second of the newest steps; 0 while no step comes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final

WINDOW: Final = 20
"""Steps over which the rate is measured."""

SHORTEST_QUIET_S: Final = 5.0
"""Seconds without a step that are never too long."""

QUIET_STEPS: Final = 3
"""Mean times of a step that may pass without one."""


class Rate:
    """Measures the rate of the newest steps; not safe among threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin without steps."""
        self._clock = clock
        self._steps: deque[tuple[float, int]] = deque(maxlen=WINDOW)
        self._newest_at = 0.0

    def add(self, seconds: float, samples: int) -> None:
        """Add a step that has ended now."""
        self._steps.append((seconds, samples))
        self._newest_at = self._clock()

    def clear(self) -> None:
        """Forget all steps."""
        self._steps.clear()

    @property
    def quiet_s(self) -> float:
        """Seconds since the newest step if they are more than steps take, else 0."""
        if not self._steps:
            return 0.0
        since_s = self._clock() - self._newest_at
        step_s = self._over_s / max(1, len(self._steps) - 1)
        return since_s if since_s > max(SHORTEST_QUIET_S, QUIET_STEPS * step_s) else 0.0

    @property
    def per_s(self) -> float:
        """Samples a second over the newest steps; 0 while no step comes."""
        if self._over_s <= 0 or self.quiet_s:
            return 0.0
        return sum(samples for _, samples in list(self._steps)[1:]) / self._over_s

    @property
    def _over_s(self) -> float:
        return self._steps[-1][0] - self._steps[0][0] if self._steps else 0.0
