"""`RateLimit`: keeps reads and inserts of a task in proportion, as Reverb's rate limiters do."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from typing import Self

from redrb.errors import ConfigError

_UNBOUNDED = 1e15

UNREAD_FILL = (
    "With fewer samples_per_insert than max_reads some reads are never allowed, and the groups "
    "that wait for them fill the limit at last, when neither puts nor takes go on"
)
"""The reason why a limit and such a rate are refused together."""

_ROUNDING = 1e-6
_FINEST = 1_000_000
"""Largest denominator that a bound is taken to have; what remains is an error of rounding."""


@dataclass(frozen=True, slots=True)
class RateLimit:
    """Keeps `inserts * samples_per_insert - reads` between two bounds, by blocking puts or takes.

    Inserts and reads are counted in groups; with several consumer groups the slowest one counts.
    The terms are those of Reverb (Cassirer et al. 2021, arXiv:2102.04736).

    Attributes:
        samples_per_insert: Reads for each insert.
        min_size: Groups that must be stored before a group is taken.
        min_diff: Lower bound, at which takes block.
        max_diff: Upper bound, at which puts block.
    """

    samples_per_insert: float
    min_size: int
    min_diff: float
    max_diff: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.samples_per_insert) and self.samples_per_insert > 0):
            raise ConfigError(f"samples_per_insert={self.samples_per_insert}: it must be > 0.")
        if self.min_size < 1:
            raise ConfigError(f"min_size={self.min_size}: it must be at least 1.")
        if not self.max_diff - self.min_diff >= self.samples_per_insert:
            raise ConfigError(
                f"between min_diff={self.min_diff} and max_diff={self.max_diff} not even one group "
                "fits: widen the error buffer."
            )
        if self._both_sides_block():
            raise ConfigError(
                f"between min_diff={self.min_diff} and max_diff={self.max_diff} neither a put nor "
                "a take fits at some time: let them differ by "
                f"{1 + self.samples_per_insert:g}, one put and one take."
            )
        if self.samples_per_insert * self.min_size > self.max_diff:
            raise ConfigError(
                f"min_size={self.min_size} can never be stored: puts block at "
                f"max_diff={self.max_diff:g}, after {self.max_diff / self.samples_per_insert:g} "
                "groups. Lower min_size, or raise max_diff."
            )

    @classmethod
    def at_least(cls, size: int) -> Self:
        """Return Reverb's MinSize: takes block until `size` groups are stored."""
        return cls(1.0, size, -_UNBOUNDED, _UNBOUNDED)

    @classmethod
    def ratio(cls, samples_per_insert: float, *, min_size: int, error_buffer: float) -> Self:
        """Return Reverb's SampleToInsertRatio.

        Args:
            samples_per_insert: Reads of each group on the average.
            min_size: Groups that must be stored before a group is taken.
            error_buffer: Reads by which the ratio may be exceeded in either direction.
        """
        offset = samples_per_insert * min_size
        return cls(samples_per_insert, min_size, offset - error_buffer, offset + error_buffer)

    @classmethod
    def queue(cls, size: int) -> Self:
        """Return Reverb's Queue: each group is read once. With the order "lifo" it is a Stack."""
        return cls(1.0, 1, 0.0, float(size))

    @property
    def bounds_reads(self) -> bool:
        """Whether takes block at a lower bound."""
        return self.min_diff > -_UNBOUNDED

    @property
    def least_stored(self) -> int:
        """The groups that must be stored, none of them read, before one can be taken."""
        if not self.bounds_reads:
            return self.min_size
        by_bound = math.ceil((self.min_diff + 1) / self.samples_per_insert - _ROUNDING)
        return max(self.min_size, by_bound)

    def _both_sides_block(self) -> bool:
        """Return whether `inserts * samples_per_insert - reads` can get to where both sides block.

        Puts block above `max_diff - samples_per_insert`, takes below `min_diff + 1`. The number is
        a multiple of 1/q if `samples_per_insert` is the fraction p/q.
        """
        if not (self.bounds_reads and self.max_diff < _UNBOUNDED):
            return False
        insert, least, most = (
            Fraction(bound).limit_denominator(_FINEST)
            for bound in (self.samples_per_insert, self.min_diff, self.max_diff)
        )
        parts = insert.denominator
        return math.floor((most - insert) * parts) + 1 < (least + 1) * parts

    def __str__(self) -> str:
        """Return the form in which Redis keeps the rate."""
        bounds = (self.samples_per_insert, self.min_size, self.min_diff, self.max_diff)
        return " ".join(f"{bound:.17g}" for bound in bounds)


def rate_of(stored: str) -> RateLimit:
    """Return the rate that Redis keeps; raises ValueError if it is damaged."""
    per_insert, size, least, most = stored.split(" ")
    return RateLimit(float(per_insert), int(size), float(least), float(most))


_TEXT = re.compile(r"(at_least|queue|ratio)\(([\d., ]+)\)")

_MAKERS: Mapping[str, Callable[..., RateLimit]] = {
    "at_least": lambda size: RateLimit.at_least(int(size)),
    "queue": lambda size: RateLimit.queue(int(size)),
    "ratio": lambda samples_per_insert, min_size, error_buffer: RateLimit.ratio(
        samples_per_insert, min_size=int(min_size), error_buffer=error_buffer
    ),
}


def parse_rate(text: str) -> RateLimit:
    """Return the rate of a text such as "queue(4)".

    Raises:
        ValueError: The text has another form.
        ConfigError: No rate can have these numbers.
    """
    matched = _TEXT.fullmatch(text)
    if matched is None:
        raise ValueError(f"{text!r:.80} is no rate")
    try:
        return _MAKERS[matched[1]](*map(float, matched[2].split(",")))
    except (TypeError, OverflowError) as error:  # too many or too few numbers
        raise ValueError(f"{text!r:.80} is no rate") from error


def rate_text(stored: str) -> str:
    """Return the text of a rate that Redis keeps; of one that no text gives, its numbers."""
    try:
        per_insert, size, least, most = map(float, stored.split(" "))
    except ValueError:
        return stored
    buffer = per_insert * size - least
    texts = (
        f"at_least({size:.15g})",
        f"queue({most:.15g})",
        f"ratio({per_insert:.15g},{size:.15g},{buffer:.15g})",
    )
    for text in texts:
        with suppress(ValueError):
            if str(parse_rate(text)) == stored:
                return text
    return stored
