"""`RateLimit`: keeps reads and inserts of a task in proportion, as Reverb's rate limiters do."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

from redrb.errors import ConfigError

_UNBOUNDED = 1e15


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

    def __str__(self) -> str:
        """Return the form in which Redis keeps the rate."""
        bounds = (self.samples_per_insert, self.min_size, self.min_diff, self.max_diff)
        return " ".join(f"{bound:.17g}" for bound in bounds)
