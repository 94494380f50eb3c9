"""`Ratio`: the weights of a mixture as whole numbers, so that counts against them are exact."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from numbers import Rational, Real

from redrb.errors import ConfigError
from redrb.keys import check_name

MOST_PARTS = 1 << 32
"""Largest sum of the parts: products in the script stay below 2**53."""

_SIMPLE_DENOMINATOR = 10_000
_FLOAT_ERROR = Fraction(1, 10**15)


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

        Decimals (0.7) and simple fractions (1 / 3) are held exactly, other floats to 2**-32.

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
        return cls(_parts(shares))

    @property
    def weights(self) -> dict[str, float]:
        """Each task's share of the whole; they add up to 1."""
        whole = sum(self.parts.values())
        return {task: part / whole for task, part in self.parts.items()}

    @property
    def digest(self) -> str:
        """A name for this ratio, independent of the scale and the order of the weights."""
        text = " ".join(f"{task}={part}" for task, part in self.parts.items())
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

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


def _parts(shares: dict[str, Fraction]) -> dict[str, int]:
    whole = _denominator(shares)
    if whole > MOST_PARTS:  # 0.14285714285714285 is 1 / 7
        simple = {
            task: share.limit_denominator(_SIMPLE_DENOMINATOR) for task, share in shares.items()
        }
        near = all(abs(simple[task] - share) < _FLOAT_ERROR for task, share in shares.items())
        if near and sum(simple.values()) == 1 and all(simple.values()):
            shares, whole = simple, _denominator(simple)
    if whole > MOST_PARTS:
        return _rounded(shares)
    return {task: int(share * whole) for task, share in shares.items()}


def _denominator(shares: dict[str, Fraction]) -> int:
    return math.lcm(*(share.denominator for share in shares.values()))


def _rounded(shares: dict[str, Fraction]) -> dict[str, int]:
    """Return shares of `MOST_PARTS`, by largest remainder."""
    parts = {task: int(share * MOST_PARTS) for task, share in shares.items()}
    for task, part in parts.items():
        if part == 0:
            raise ConfigError(
                f"the weight of task {task!r} is less than 2**-32 of all weights together: leave "
                "the task out, or give it more."
            )
    behind = sorted(parts, key=lambda task: parts[task] - shares[task] * MOST_PARTS)
    for task in behind[: MOST_PARTS - sum(parts.values())]:
        parts[task] += 1
    return parts
