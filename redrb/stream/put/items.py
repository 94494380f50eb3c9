"""The arguments of a put as groups: lists of samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from redrb.errors import RecordError
from redrb.experience import BufferItem, Experience, split_experience_batch
from redrb.experience.records import batch_size, per_sample

Items: TypeAlias = BufferItem | Sequence[BufferItem] | Experience

_NO_LISTS = (str, bytes, Mapping, Tensor)
"""Iterable types that are no list of samples."""


@dataclass(frozen=True, slots=True)
class GroupedRows:
    """A batch of which rows with the same `group_id` are one group, and others one each."""

    experience: Experience

    def rows(self) -> list[list[int]]:
        """Return the rows of each group, in the order of their first ones."""
        size = batch_size(self.experience)
        found: dict[object, list[int]] = {}
        for row, name in enumerate(per_sample(self.experience, "group_id", size)):
            found.setdefault(row if name is None else name, []).append(row)
        return list(found.values())

    def groups(self) -> list[list[BufferItem]]:
        """Return the samples of each group."""
        items = split_experience_batch(self.experience)
        return [[items[row] for row in rows] for rows in self.rows()]


def listed(given: object, what: str) -> list[Any]:
    """Return what is to be put as a list, or raise RecordError."""
    if isinstance(given, list):
        return given
    if isinstance(given, _NO_LISTS) or not isinstance(given, Iterable):
        raise RecordError(
            f"a {type(given).__name__} where a list of {what} is needed: put takes a "
            "redrb.BufferItem, a list of them or a redrb.Experience, put_many a list of such lists."
        )
    return list(given)
