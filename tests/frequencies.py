"""Whether frequencies of draws are those of a formula."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

NORMAL = 5.6
"""Quantile of the normal distribution: a right draw fails once in 1e8 tests."""


def check_frequencies(counts: Counter[int], expected: Sequence[float]) -> None:
    """Check that the numbers 0, 1, ... were drawn with their expected probabilities.

    Pearson's statistic must be below its quantile, by the formula of Wilson and Hilferty 1931.
    """
    total = sum(counts.values())
    assert sum(counts[number] for number in range(len(expected))) == total
    found = sum((counts[n] - total * p) ** 2 / (total * p) for n, p in enumerate(expected))
    freedom = len(expected) - 1
    spread = 2 / (9 * freedom)
    assert found < freedom * (1 - spread + NORMAL * spread**0.5) ** 3, (counts, expected)
