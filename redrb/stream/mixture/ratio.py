"""`Ratio`: the weights of a mixture as whole numbers, so that counts against them are exact."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from numbers import Rational, Real

from redrb.errors import ConfigError
from redrb.keys import check_name


class Split:
    """The groups that one mixture has taken of each task, and the shares of its next take.

    Group number k of a task is due when its weight times all groups reaches k, and may be taken as
    soon as that passes k - 1. Always taking the group that is due first never misses a due moment
    (the quota method of Balinski and Young, 1975), so each task stays within one group of its
    quota, for any takes. Largest remainders do not: they may give a group that a later take would
    have to take back.
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


@dataclass(frozen=True, slots=True)
class Ratio:
    """Each task's share of a mixture.

    Attributes:
        parts: Task -> whole number, sorted by name; its share is this number over the sum of all.
    """

    parts: dict[str, int]

    @classmethod
    def of(cls, weights: Mapping[str, float]) -> Ratio:
        """Return the ratio of weights, exactly as written: 0.7 is 7/10; raises ConfigError."""
        if not isinstance(weights, Mapping) or not weights:
            raise ConfigError(
                f'a mixture of {weights!r}: give a weight a task, such as {{"math": 0.7, "code": '
                "0.3}."
            )
        exact = {check_name("task", task): _fraction(task, weights[task]) for task in weights}
        whole = sum(exact.values())
        shares = {task: exact[task] / whole for task in sorted(exact)}
        denominator = math.lcm(*(share.denominator for share in shares.values()))
        return cls({task: int(share * denominator) for task, share in shares.items()})

    @property
    def weights(self) -> dict[str, float]:
        """Each task's share of the whole; they add up to 1."""
        whole = sum(self.parts.values())
        return {task: part / whole for task, part in self.parts.items()}

    def __str__(self) -> str:
        return ", ".join(f"{task} {weight:.4g}" for task, weight in self.weights.items())


def _fraction(task: str, weight: object) -> Fraction:
    """Return a weight as it was written: 0.7 is 7/10."""
    exact, is_bool = Fraction(0), isinstance(weight, bool)
    if isinstance(weight, Rational) and not is_bool:
        exact = Fraction(int(weight.numerator), int(weight.denominator))
    elif isinstance(weight, Real) and not is_bool and math.isfinite(float(weight)):
        exact = Fraction(repr(float(weight)))
    if exact > 0:
        return exact
    raise ConfigError(
        f"the weight of task {task!r} is {weight!r}: it must be a positive finite number. "
        "Leave out a task that is not to be taken from."
    )
