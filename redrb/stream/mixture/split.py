"""`Split`: how takes divide among the tasks of a mixture, so that the ratios hold exactly."""

from __future__ import annotations

from fractions import Fraction

from redrb.stream.mixture.ratio import Ratio


class Split:
    """The groups that one mixture has taken of each task, and the shares of its next take.

    Group number k of a task is due when its weight times all groups reaches k, and may be taken as
    soon as that passes k - 1. Always taking the group that is due first never misses a due moment
    (the quota method of Balinski and Young, 1975), so each task stays within one group of its
    quota, for any takes. Largest remainders do not: they may give a group that a later take would
    have to take back.

    Attributes:
        taken: Task -> groups taken.
    """

    def __init__(self, ratio: Ratio) -> None:
        self._parts = ratio.parts
        self._whole = sum(ratio.parts.values())
        self.taken = dict.fromkeys(ratio.parts, 0)

    def shares(self, count: int) -> dict[str, int]:
        """Return the groups to take of each task; they add up to `count`."""
        total = sum(self.taken.values()) + count
        behind = {  # groups, times `whole`; they add up to those of the take
            task: part * total - self._whole * self.taken[task]
            for task, part in self._parts.items()
        }
        shares = {task: max(0, credit // self._whole) for task, credit in behind.items()}
        for _ in range(count - sum(shares.values())):
            left = {task: behind[task] - shares[task] * self._whole for task in shares}
            due = {
                task: Fraction(self._whole - left[task], self._parts[task])
                for task in left
                if left[task] > 0
            }
            shares[min(due, key=due.__getitem__)] += 1
        return shares

    def keep(self, shares: dict[str, int]) -> None:
        """Count the groups of a take."""
        self.taken = {task: self.taken[task] + share for task, share in shares.items()}
