"""By arrival."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from redrb.orders.order import GroupFacts, Score


@dataclass(frozen=True, slots=True)
class Fifo:
    """First in, first out; what came back from a lease keeps its place.

    Costs nothing at put: arrival is the order in which the stream holds the groups.
    """

    name: ClassVar[str] = "fifo"
    sampled: ClassVar[bool] = False

    def score(self, _: GroupFacts) -> Score:
        """Return the place of arrival."""
        return "arrival"


@dataclass(frozen=True, slots=True)
class Lifo:
    """Last in, first out: with `RateLimit.queue`, Reverb's stack."""

    name: ClassVar[str] = "lifo"
    sampled: ClassVar[bool] = False

    def score(self, _: GroupFacts) -> Score:
        """Return the opposite of the place of arrival."""
        return "-arrival"
