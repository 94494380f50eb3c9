"""`PutBatch`: the encoded groups of one put, with the values that the task indexes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from redrb.codec import EncodedGroup
from redrb.stream.put.index_values import NO_VALUES, IndexValues
from redrb.stream.put.options import PutOptions

NO_OPTIONS = PutOptions()


@dataclass(frozen=True, slots=True)
class PutBatch:
    """Encoded groups, with the facts that a task may keep beside their bytes.

    Attributes:
        groups: The groups.
        revision: The task's settings that the groups were prepared for.
        options: The options of the put.
        values: The values of the samples that the task indexes.
        filtered: Groups of the same put that a filter dropped.
        expired: Groups that their producer found too stale, and keeps back.
    """

    groups: Sequence[EncodedGroup]
    revision: str = ""
    options: PutOptions = NO_OPTIONS
    values: IndexValues = NO_VALUES
    filtered: int = 0
    expired: int = 0

    def __bool__(self) -> bool:
        """Return whether there are groups to store or to count."""
        return bool(self.groups) or self.filtered + self.expired > 0

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
        )
