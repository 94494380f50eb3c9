"""Splits the items of a put into groups of samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from redrb.errors import RecordError
from redrb.experience import BufferItem, Experience, split_experience_batch
from redrb.experience.records import batch_size, per_sample

Items: TypeAlias = BufferItem | Sequence[BufferItem] | Experience
"""The items that `put` takes."""

Groups: TypeAlias = list[list[BufferItem]] | Experience
"""Groups of samples; the rows of an Experience are one group each."""

_NO_LISTS = (str, bytes, Mapping, Tensor)
"""Iterable types that are no list of samples."""


@dataclass(frozen=True, slots=True)
class GroupedRows:
    """A batch whose rows with the same `group_id` are one group; a row without one is a group."""

    experience: Experience

    def rows(self) -> list[list[int]]:
        """Return the row numbers of each group, groups in the order of their first rows."""
        size = batch_size(self.experience)
        found: dict[object, list[int]] = {}
        for row, group_id in enumerate(per_sample(self.experience, "group_id", size)):
            found.setdefault(row if group_id is None else group_id, []).append(row)
        return list(found.values())

    def groups(self) -> list[list[BufferItem]]:
        """Return the samples of each group."""
        items = split_experience_batch(self.experience)
        return [[items[row] for row in rows] for rows in self.rows()]


def groups_of(items: Items | GroupedRows) -> Groups:
    """Return the groups of a `put`: a list of samples is one, an Experience one a row."""
    if isinstance(items, BufferItem):
        return [[items]]
    if isinstance(items, Experience):
        return items
    if isinstance(items, GroupedRows):
        return items.groups()
    group = as_list(items, "samples")
    return [group] if group else []


def groups_of_many(groups: Sequence[Sequence[BufferItem]]) -> list[list[BufferItem]]:
    """Return the groups of a `put_many`; raises as `groups_of` does."""
    return [as_list(group, "samples") for group in as_list(groups, "lists of samples")]


def as_list(items: object, content: str) -> list[Any]:
    """Return any iterable as a list; raises RecordError for types that are no list of samples."""
    if isinstance(items, list):
        return items
    if isinstance(items, _NO_LISTS) or not isinstance(items, Iterable):
        raise RecordError(
            f"a {type(items).__name__} where a list of {content} is needed: put takes a "
            "redrb.BufferItem, a list of them or a redrb.Experience, put_many a list of such lists."
        )
    return list(items)
