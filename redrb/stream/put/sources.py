"""The sources of a put of forwarded groups: each source is stored once, whoever repeats the put."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from redrb.stream.task.origin import Source


class SourcesRefused(Exception):
    """A put of forwarded groups was not stored, because of their sources.

    Attributes:
        row: The origin's row in Redis, if it is of another incarnation than the sources, or all
            groups up to a later id have left the origin; None: some of the sources are stored.
    """

    def __init__(self, row: str | None) -> None:
        self.row = row
        super().__init__("sources were stored before" if row is None else "sources of the past")


@dataclass(frozen=True, slots=True)
class Sources:
    """The sources of one put.

    Attributes:
        floor: All groups up to this id have left the origin for good, as it said.
        returning: Those that have not: dead letters, for example.
        kept: Source of each group to store.
        dropped: Sources of groups that are counted as filtered.
    """

    origin: str = ""
    incarnation: str = ""
    floor: int = 0
    returning: tuple[str, ...] = ()
    kept: tuple[Source, ...] = ()
    dropped: tuple[Source, ...] = ()

    def __bool__(self) -> bool:
        """Return whether there are any."""
        return bool(self.kept or self.dropped)

    def keeping(self, places: Sequence[int]) -> Self:
        """Return the sources of a put that stores the groups with these indices only."""
        if not self.kept or len(places) == len(self.kept):
            return self
        stored = frozenset(places)
        others = [source for place, source in enumerate(self.kept) if place not in stored]
        kept = tuple([self.kept[place] for place in places])
        return replace(self, kept=kept, dropped=(*self.dropped, *others))

    def part(self, start: int, end: int) -> Self:
        """Return the sources of some groups; those of dropped ones go with the first part."""
        return replace(self, kept=self.kept[start:end], dropped=() if start else self.dropped)

    def record(self) -> dict[str, Any] | None:
        """Return them as the script `put/put` reads them; None if there are none."""
        if not self:
            return None
        all_of_them = (*self.kept, *self.dropped)
        return {
            "origin": self.origin,
            "incarnation": self.incarnation,
            "floor": self.floor,
            "kept": self.returning,
            "ids": [str(source.seq) for source in all_of_them],
            "digests": [source.digest for source in all_of_them],
        }


NO_SOURCES = Sources()
