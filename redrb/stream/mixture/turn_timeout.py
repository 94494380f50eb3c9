"""`TurnTimeout`: how long a take from a mixture waits, for its turn and then for groups."""

from __future__ import annotations

from redrb.stream.waiting import SHORT_OUTAGE_S, SLICE_S, Wait


class TurnTimeout(Wait):
    """A wait with a grace period for a turn: while no task starves, a turn is over soon."""

    @property
    def left_s(self) -> float | None:
        """Seconds until the time is up; None: there is no limit."""
        return None if self._timeout is None else max(0.0, self._timeout - self.waited_s)

    @property
    def exhausted(self) -> bool:
        """Whether the time is up, the grace period for a turn included."""
        return self._timeout is not None and self.waited_s >= self._timeout + SHORT_OUTAGE_S

    def slice_for_turn(self, *, starving: bool) -> float:
        """Return how long to block before asking for the turn again."""
        if self._timeout is None:
            return SLICE_S
        grace_s = 0.0 if starving else SHORT_OUTAGE_S
        return max(0.0, min(SLICE_S, self._timeout + grace_s - self.waited_s))
