"""Encoded groups on their way into a task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from redrb.codec import EncodedGroup
from redrb.experience import Status
from redrb.experience.records import Scalar


@dataclass(frozen=True, slots=True)
class PutBatch:
    """Encoded groups, and of each what its bytes do not tell; None: nothing of any.

    Attributes:
        groups: The groups.
        priority: Priority of all of them.
        newest: Version of the newest token of each, by the rule of the staleness of tokens.
        tags: Values of the declared tags of each.
        given_tags: What put was given for the tags of all of them.
        filtered: Groups that a filter has dropped before these.
        expired: Groups that their producer found too stale, and keeps back.
    """

    groups: Sequence[EncodedGroup]
    priority: float | None = None
    newest: Sequence[int | None] | None = None
    tags: Sequence[Sequence[Scalar | None]] | None = None
    given_tags: Mapping[str, Scalar | None] | None = None
    filtered: int = 0
    expired: int = 0

    def __len__(self) -> int:
        """Return the number of groups."""
        return len(self.groups)

    def __bool__(self) -> bool:
        """Return whether there is anything to tell the task."""
        return bool(self.groups) or self.filtered + self.expired > 0

    @property
    def needs_index(self) -> bool:
        """Whether a plain task cannot hold them."""
        return (
            self.priority is not None
            or self.expired > 0
            or any(group.status is not Status.COMPLETED for group in self.groups)
        )

    def part(self, start: int, end: int) -> Self:
        """Return some of the groups; what was filtered goes with the first."""
        if start == 0 and end >= len(self.groups):
            return self
        return replace(
            self,
            groups=self.groups[start:end],
            newest=None if self.newest is None else self.newest[start:end],
            tags=None if self.tags is None else self.tags[start:end],
            filtered=self.filtered if start == 0 else 0,
            expired=self.expired if start == 0 else 0,
        )

    def as_sent(self, payloads: Sequence[memoryview]) -> Self:
        """Return the groups with these bytes."""
        groups = [
            group._replace(parts=(payload,))
            for group, payload in zip(self.groups, payloads, strict=True)
        ]
        return replace(self, groups=groups)
