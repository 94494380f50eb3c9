"""`PutBatch`: the encoded groups of one put, with the values that the task indexes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Self

import msgspec

from redrb.codec import EncodedGroup
from redrb.errors import RedrbError
from redrb.stream.put.index_values import NO_VALUES, IndexValues
from redrb.stream.put.options import PutOptions
from redrb.stream.put.rights import NO_RIGHTS, Rights
from redrb.stream.put.sources import NO_SOURCES, Sources

if TYPE_CHECKING:
    from redrb.tracing.spans import PutSpan

NO_OPTIONS = PutOptions()


class Claim(msgspec.Struct, frozen=True):
    """Says which parts are to become a group, or to be removed.

    Attributes:
        key: Key of the group.
        count: Number of its parts; a claim is refused if others came.
        outcome: The counter of the task that counts the group.
    """

    key: str
    count: int
    outcome: Literal["completed", "delivered", "dropped", "dead"]


@dataclass(frozen=True, slots=True)
class PutBatch:
    """Encoded groups, with the facts that a task may keep beside their bytes.

    Attributes:
        revision: The task's settings that the groups were prepared for.
        filtered: Groups of the same put that a filter dropped.
        expired: Groups that their producer found too stale, and keeps back.
        refused: The error of each group that cannot be stored, by its index in the put; in
            `groups` are the others.
        kind: Kind of the completed groups, see `kind_of`; "" if that is not checked.
        versions: Whether each sample needs a weight version, if the task has a bound of staleness.
        rights: The rights of admission of the groups, and of those that are not stored.
        sources: The sources of forwarded groups, and of those that are not stored.
        spans: Spans of the groups that are traced, None for others; empty if no group is.
        parts: Claim on the parts that the put's one group is made of; None if it is made of none.
    """

    groups: Sequence[EncodedGroup]
    revision: str = ""
    options: PutOptions = NO_OPTIONS
    values: IndexValues = NO_VALUES
    filtered: int = 0
    expired: int = 0
    refused: Mapping[int, RedrbError] = field(default_factory=dict)
    kind: str = ""
    versions: bool = False
    rights: Rights = NO_RIGHTS
    sources: Sources = NO_SOURCES
    spans: Sequence[PutSpan | None] = ()
    parts: Claim | None = None

    def __bool__(self) -> bool:
        """Return whether there are groups to store or to count."""
        return bool(self.groups) or self.filtered + self.expired > 0

    def raise_refused(self) -> None:
        """Raise the error of the first group that cannot be stored; its notes name the others.

        The put is over then, and its rights return to their source.
        """
        error = self.refusal()
        if error is not None:
            self.rights.end(0, counted=False)
            raise error

    def refusal(self) -> RedrbError | None:
        """Return the error that `raise_refused` raises; None if no group is refused."""
        if not self.refused:
            return None
        first, *others = self.refused.values()
        first.bad_groups = tuple(self.refused)
        for error in others:
            first.add_note(f"also refused: {error}")
        return first

    def dropping_refused(self) -> Self:
        """Return the batch with the refused groups counted as filtered."""
        return replace(self, filtered=self.filtered + len(self.refused), refused={})

    def end_spans(self, ids: Sequence[int]) -> None:
        """End the spans of the groups; those that are stored, the first ones, have these ids."""
        for place, span in enumerate(self.spans):
            if span is not None:
                span.end(ids[place] if place < len(ids) else None)

    def part(self, start: int, end: int) -> Self:
        """Return some of the groups; the counts of dropped groups go with the first part."""
        if start == 0 and end >= len(self.groups):
            return self
        return replace(
            self,
            groups=self.groups[start:end],
            values=self.values.part(start, end),
            filtered=self.filtered if start == 0 else 0,
            expired=self.expired if start == 0 else 0,
            rights=self.rights.part(start, end),
            sources=self.sources.part(start, end),
        )
