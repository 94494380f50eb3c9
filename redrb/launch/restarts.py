"""When a process that died is started again, and when it is given up."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_DELAY_S = 1.0
"""Delay before the first restart; each further one is twice as long."""

LONGEST_DELAY_S = 60.0
"""Longest delay before a restart."""

WELL_S = 60.0
"""A process that ran for so long ran well: its earlier deaths are forgotten."""


@dataclass
class Restarts:
    """Counts the deaths of one process that followed one another.

    Attributes:
        most: Restarts in a row; the next death is the last.
        deaths: Deaths since the process last ran well.
        total: All restarts.
    """

    most: int
    deaths: int = 0
    total: int = 0

    def delay_s(self, ran_s: float) -> float | None:
        """Count a death; return the delay before the restart, or None: the process is given up."""
        if ran_s >= WELL_S:
            self.deaths = 0
        self.deaths += 1
        if self.deaths > self.most:
            return None
        self.total += 1
        return min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(self.deaths - 1, 10))
