"""The options of a put that hold for all its groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from redrb.checks import checked_int_or_none, checked_number
from redrb.errors import ConfigError
from redrb.experience import Status
from redrb.experience.fields import Scalar
from redrb.stream.arguments import AnyStatus, checked_status
from redrb.stream.put.rights import RightsSource
from redrb.stream.task.origin import SourceGroup


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
        kept: SourceGroup of each group to store.
        dropped: Sources of groups that are counted as filtered.
    """

    origin: str = ""
    incarnation: str = ""
    floor: int = 0
    returning: tuple[str, ...] = ()
    kept: tuple[SourceGroup, ...] = ()
    dropped: tuple[SourceGroup, ...] = ()

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


@dataclass(frozen=True, slots=True, kw_only=True)
class PutOptions:
    """Options that hold for all groups of a put, checked.

    Attributes:
        policy_version: Policy version of samples that have none.
        status: Status of the groups; None: derived from their samples.
        tags: Values of declared tags, in place of those of the samples.
        admission: The rights that the groups use; None: none.
        sources: The sources of forwarded groups.
    """

    policy_version: int | None = None
    priority: float | None = None
    status: Status | None = None
    tags: Mapping[str, Scalar | None] | None = None
    admission: RightsSource | None = None
    sources: Sources = NO_SOURCES

    @classmethod
    def checked(
        cls,
        policy_version: object = None,
        priority: object = None,
        status: AnyStatus | None = None,
        tags: Mapping[str, Scalar | None] | None = None,
        admission: RightsSource | None = None,
    ) -> PutOptions:
        """Return the options that users gave; raises ConfigError if one is not usable."""
        if all(each is None for each in (policy_version, priority, status, tags, admission)):
            return NO_OPTIONS
        if not (tags is None or isinstance(tags, Mapping)):
            raise ConfigError(f"tags={tags!r:.80}: give a dict, a value for each tag.")
        if not (admission is None or isinstance(admission, RightsSource)):
            raise ConfigError(f"admission={admission!r:.80}: give what stream.admit() returned.")
        return cls(
            policy_version=checked_int_or_none("policy_version", policy_version),
            priority=None if priority is None else checked_number("priority", priority),
            status=None if status is None else checked_status(status),
            tags=tags,
            admission=admission,
        )


NO_OPTIONS = PutOptions()
