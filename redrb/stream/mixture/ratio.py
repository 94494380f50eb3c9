"""`Ratio`: the weights of a mixture as whole numbers, so that counts against them are exact."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from numbers import Rational, Real

from redrb.errors import ConfigError
from redrb.keys import check_name


@dataclass(frozen=True, slots=True)
class Ratio:
    """Each task's share of a mixture.

    Attributes:
        parts: Task -> whole number, sorted by name; its share is this number over the sum of all.
    """

    parts: dict[str, int]

    @classmethod
    def of(cls, weights: Mapping[str, float]) -> Ratio:
        """Return the ratio of weights of any scale.

        They are held exactly, as they are written: 0.7 is seven tenths.

        Raises:
            ConfigError: There is no task, a name is not usable, or a weight is not a positive
                finite number.
        """
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
