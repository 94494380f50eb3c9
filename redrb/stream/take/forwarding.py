"""Forwards leased groups to another task: put there once, then acknowledged here."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

from xxhash import xxh3_64_hexdigest

from redrb.codec import GroupLayout
from redrb.errors import ConfigError, RecordError
from redrb.experience import BufferItem, Experience, split_experience_batch
from redrb.experience.records import Scalar
from redrb.stream.arguments import AnyStatus
from redrb.stream.take.part import LeasePart
from redrb.stream.task.origin import Origin, SourceGroup

ForwardedGroup: TypeAlias = BufferItem | Sequence[BufferItem] | Experience | None
"""The samples of one group; None filters it."""

ForwardedGroups: TypeAlias = Sequence[ForwardedGroup] | Mapping[int, ForwardedGroup] | Experience
"""A group for each leased one; or by id; or all samples of the lease as one batch."""

Name = TypeVar("Name", bound=Hashable)
"""The name of a group in its lease: an id, or a task and an id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOptions:
    """Options of the put into the next task, as `ExperienceStream.put` takes them."""

    priority: float | None = None
    status: AnyStatus | None = None
    tags: Mapping[str, Scalar | None] | None = None


class Target(Protocol):
    """The next task: an `ExperienceStream`."""

    def store_forwarded(
        self,
        groups: Sequence[list[BufferItem] | None],
        sources: Sequence[SourceGroup],
        origin: Origin,
        options: ForwardOptions,
    ) -> list[int | None]:
        """Store groups whose sources were not stored before; return the ids of all."""


@dataclass(slots=True)
class Forwarded:
    """The groups of one part of a lease that are to be forwarded.

    Attributes:
        groups: Their samples; None: filter the group.
    """

    part: LeasePart
    seqs: list[int]
    groups: list[list[BufferItem] | None]

    def store(self, target: Target, options: ForwardOptions) -> list[int | None]:
        """Store the groups in the next task; returns their ids there."""
        part = self.part
        part.check_own()
        sources = [
            SourceGroup(part.first_ids.get(seq, seq), _digest(part.layouts[seq]))
            for seq in self.seqs
        ]
        return target.store_forwarded(self.groups, sources, self._origin, options)

    @property
    def _origin(self) -> Origin:
        if self.part.origin is None:
            raise ConfigError("groups that were not taken from a task cannot be forwarded.")
        return self.part.origin


def store_in_turn(
    parts: Sequence[tuple[LeasePart, Mapping[Name, int], Target]],
    chosen: Mapping[Name, list[BufferItem] | None],
    options: ForwardOptions,
) -> tuple[dict[Name, int | None], list[tuple[LeasePart, tuple[int, ...]]]]:
    """Store the chosen groups in their next tasks, one part of the lease after the other.

    Args:
        parts: The parts, the numbers of the groups of each by name, and the next task of each.

    Returns:
        The id of each group in its next task, by name; and the groups to acknowledge.
    """
    ids: dict[Name, int | None] = {}
    stored = []
    for part, seqs, target in parts:
        names = [name for name in chosen if name in seqs]
        if names:
            one = Forwarded(part, [seqs[name] for name in names], [chosen[name] for name in names])
            ids |= dict(zip(names, one.store(target, options), strict=True))
            stored.append((part, tuple(one.seqs)))
    return ids, stored


def chosen_groups(
    groups: Sequence[ForwardedGroup] | Mapping[Name, ForwardedGroup] | Experience,
    ids: Sequence[Name],
    samples: Sequence[int],
) -> dict[Name, list[BufferItem] | None]:
    """Return the samples of each group that is to be forwarded, by name.

    Raises:
        ConfigError: There is not one entry for each group, or an id is not leased.
        RecordError: An entry is no group.
    """
    if isinstance(groups, Experience):
        return dict(zip(ids, _divided(groups, samples), strict=True))
    if isinstance(groups, Mapping):
        unknown = sorted(set(groups).difference(ids), key=str)
        if unknown:
            raise ConfigError(f"groups {unknown} are not in this lease; it holds {list(ids)}.")
        return {seq: _samples_of(seq, group) for seq, group in groups.items()}
    if not isinstance(groups, list | tuple):
        raise ConfigError(
            f"groups={groups!r:.80}: give a list with the samples of each leased group, a dict by "
            "id, or one Experience with all samples of the lease."
        )
    if len(groups) != len(ids):
        raise ConfigError(
            f"{len(groups)} groups for a lease of {len(ids)}: give one entry for each leased group "
            "in order, None for groups to filter, or a dict with some of the ids."
        )
    return {seq: _samples_of(seq, group) for seq, group in zip(ids, groups, strict=True)}


def _divided(batch: Experience, samples: Sequence[int]) -> list[list[BufferItem] | None]:
    items = split_experience_batch(batch)
    if len(items) != sum(samples):
        raise RecordError(
            f"the batch has {len(items)} rows, the lease {sum(samples)} samples: give "
            "lease.batch() with added fields, or a list of groups."
        )
    rows = iter(items)
    return [[next(rows) for _ in range(count)] for count in samples]


def _samples_of(seq: Hashable, group: ForwardedGroup) -> list[BufferItem] | None:
    if group is None:
        return None
    if isinstance(group, BufferItem):
        return [group]
    if isinstance(group, Experience):
        return split_experience_batch(group)
    samples = list(group) if isinstance(group, Sequence) else []
    if not samples or not all(isinstance(each, BufferItem) for each in samples):
        raise RecordError(
            f"group {seq} is to be forwarded as {group!r:.80}: give its samples, an Experience, or "
            "None to filter it."
        )
    return samples


def _digest(layout: GroupLayout) -> str:
    return xxh3_64_hexdigest(layout.blob)
