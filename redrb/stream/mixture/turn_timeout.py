"""`TurnTimeout`: how long a take from a mixture waits, for its turn and then for groups."""

from __future__ import annotations

from redrb.stream.waiting import SHORT_OUTAGE_S, SLICE_S, Wait


class TurnTimeout(Wait):
    """A wait with a grace period for a turn: while no task starves, a turn is over soon."""

    @property
    def exhausted(self) -> bool:
        """Whether the time is up, the grace period for a turn included."""
        return self.over_by(SHORT_OUTAGE_S)

    def slice_for_turn(self, *, starving: bool) -> float:
        """Return how long to block before asking for the turn again."""
        if starving or self._timeout is None:
            return self.slice_s()
        return self.most_s(max(0.0, min(SLICE_S, self._timeout + SHORT_OUTAGE_S - self.waited_s)))
