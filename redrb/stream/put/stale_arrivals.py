"""The warning that all groups of a task are too stale when they arrive."""

from __future__ import annotations

import logging
import math
import time

from redrb.stream.waiting import WARN_EVERY_S

_log = logging.getLogger("redrb")

STALE_ROW = 8
"""Groups in a row that expire on arrival before a producer warns."""


class StaleArrivals:
    """Warns when every group of a producer expires on arrival: nothing is ever trained then."""

    def __init__(self, task: str) -> None:
        self._task = task
        self._row = 0
        self._warned_at = -math.inf

    def note(self, groups: int, expired: int) -> None:
        """Count the groups of one reply, and those of them that expired on arrival."""
        if not expired or expired < groups:
            self._row = 0
            return
        self._row += groups
        now = time.monotonic()
        if self._row >= STALE_ROW and now - self._warned_at >= WARN_EVERY_S:
            self._warned_at = now
            _log.warning(
                "task %r: the last %d groups were too stale when they arrived, none is left to "
                "train on: raise max_staleness, publish weights less often, or make groups faster",
                self._task,
                self._row,
            )
