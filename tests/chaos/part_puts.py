"""Groups in parts, in the journals: which may be there, and which must be."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.failovers import Span
from tests.chaos.options import PART_AGE_S

_AGE_IS_UNSURE_S = 2.0
"""By how much the clock of a task may be ahead; it stops and jumps with those of the servers."""


@dataclass
class _Group:
    """Index of each part -> when its first call began; the calls of it that returned."""

    of: int = 0
    begun: dict[int, float] = field(default_factory=dict)
    there: dict[int, list[Span]] = field(default_factory=lambda: defaultdict(list))


@dataclass
class PartPuts:
    """All calls of `put_part`.

    Parts that returned were confirmed by replicas, as puts were.

    Attributes:
        admitted: Groups of which a part was put with a right.
        keeping: Those of them that have surely got it.
    """

    admitted: set[str] = field(default_factory=set)
    keeping: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._groups = defaultdict[str, _Group](_Group)

    def add(self, begin: dict[str, Any], end: dict[str, Any]) -> None:
        """Note a call by its two lines."""
        group, index = self._groups[begin["part"]], begin["index"]
        group.of = begin["of"]
        group.begun[index] = min(begin["t"], group.begun.get(index, begin["t"]))
        span = Span(begin["t"], end.get("t", begin["t"]))
        there = "there" in end
        if there:
            group.there[index].append(span)
        if begin["right"]:
            self.admitted.add(begin["part"])
            if there and "stored" not in end:
                self.keeping.add(begin["part"])

    def begun(self) -> dict[str, float]:
        """Return the groups of which all parts were put, and when the last of them began."""
        return {
            name: max(group.begun.values())
            for name, group in self._groups.items()
            if len(group.begun) == group.of
        }

    def complete(self) -> set[str]:
        """Return the groups of which all parts were surely there before the age limit."""
        found = set[str]()
        for name, group in self._groups.items():
            if len(group.there) == group.of:
                last = max(min(span.ended for span in spans) for spans in group.there.values())
                if last < min(group.begun.values()) + PART_AGE_S - _AGE_IS_UNSURE_S:
                    found.add(name)
        return found
