"""`Histogram`: groups counted by staleness, in few buckets."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

BOUNDS = (0, 1, 2, 4, 8, 16, 32)
"""Largest staleness of each bucket but the last, in weight versions; the last one has no end."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """Groups counted by staleness.

    Attributes:
        counts: Groups in each bucket: `BOUNDS`, then those beyond the last bound.
        unknown: Groups without a policy version, or in a task that knows no weight version.
        mean: Mean staleness of the groups in the buckets; None where it is not known. Of waiting
            groups beyond the last bound only the largest staleness is known: they count as the
            middle between both.
        largest: Largest staleness of a group; None if there is none.
        sampled: Whether only some of the groups were read, so that counts are shares of these.
    """

    counts: tuple[int, ...] = (0,) * (len(BOUNDS) + 1)
    unknown: int = 0
    mean: float | None = None
    largest: int | None = None
    sampled: bool = False

    @classmethod
    def of(cls, groups: Mapping[int, int], *, unknown: int = 0, sampled: bool = False) -> Histogram:
        """Return the histogram of exact counts: staleness -> groups."""
        counts = [0] * (len(BOUNDS) + 1)
        for staleness, number in groups.items():
            counts[bisect_left(BOUNDS, staleness)] += number
        total = sum(groups.values())
        mean = sum(age * number for age, number in groups.items()) / total if total else None
        largest = max((age for age, number in groups.items() if number), default=None)
        return cls(tuple(counts), unknown, mean, largest, sampled)

    @classmethod
    def summed(cls, parts: Sequence[Histogram]) -> Histogram:
        """Return the sum of several histograms."""
        known = [part for part in parts if part.total]
        total = sum(part.total for part in known)
        means = [part.mean * part.total for part in known if part.mean is not None]
        return cls(
            tuple(map(sum, zip(*(part.counts for part in parts), strict=True))),
            sum(part.unknown for part in parts),
            sum(means) / total if total else None,
            max((part.largest for part in known if part.largest is not None), default=None),
            any(part.sampled for part in parts),
        )

    @property
    def total(self) -> int:
        """Groups in all buckets."""
        return sum(self.counts)


def bucket_names() -> list[str]:
    """Return the names of the buckets, such as "0", "3-4" and "33+"."""
    names, low = [], 0
    for bound in BOUNDS:
        names.append(str(bound) if bound == low else f"{low}-{bound}")
        low = bound + 1
    return [*names, f"{low}+"]
