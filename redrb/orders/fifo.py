"""Orders by arrival: first in, first out, and last in, first out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from redrb.orders.order import GroupFacts, Score


@dataclass(frozen=True, slots=True)
class Fifo:
    """First in, first out; groups that return from a lease keep their place.

    It costs nothing at put, because the stream in Redis holds the groups in this order.
    """

    name: ClassVar[str] = "fifo"
    sampled: ClassVar[bool] = False

    def score(self, _: GroupFacts) -> Score:
        """Return the position of arrival."""
        return "arrival"


@dataclass(frozen=True, slots=True)
class Lifo:
    """Last in, first out: with `RateLimit.queue`, Reverb's stack."""

    name: ClassVar[str] = "lifo"
    sampled: ClassVar[bool] = False

    def score(self, _: GroupFacts) -> Score:
        """Return the negative position of arrival."""
        return "-arrival"
