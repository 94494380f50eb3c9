"""What a put is given: checked, filtered and encoded, with what an indexed task wants to know."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from torch import Tensor

from redrb.codec import EncodedGroup, encode_experience, encode_groups
from redrb.errors import ConfigError, RecordError
from redrb.experience import BufferItem, Experience, Status, split_experience_batch
from redrb.experience.checking import check_rewards, check_row_rewards, check_rows, check_sample
from redrb.experience.records import Scalar, batch_size, per_sample
from redrb.stream.arguments import AnyStatus, checked_status, finite, whole_or_none
from redrb.stream.put.batch import Batch
from redrb.stream.put.filters import Filter, split
from redrb.stream.task.tags import tag_values

Items: TypeAlias = BufferItem | Sequence[BufferItem] | Experience
NarrowFloats: TypeAlias = Literal["float16", "bfloat16"]

_NO_LISTS = (str, bytes, Mapping, Tensor)
"""What can be iterated over, and is no list of samples."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What a put says of all its groups; None: nothing, or what their samples say."""

    policy_version: int | None = None
    priority: float | None = None
    status: AnyStatus | None = None
    tags: Mapping[str, Scalar | None] | None = None

    def __post_init__(self) -> None:
        checked: dict[str, object] = {
            "policy_version": whole_or_none("policy_version", self.policy_version),
            "priority": None if self.priority is None else finite("priority", self.priority),
            "status": None if self.status is None else checked_status(self.status),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if not (self.tags is None or isinstance(self.tags, Mapping)):
            raise ConfigError(f"tags={self.tags!r:.80}: give a dict, a value for each tag.")


@dataclass(frozen=True, slots=True)
class Intake:
    """Prepares what is put into one task.

    Attributes:
        narrow_floats: Dtype for float bodies, see `ExperienceStream`.
        filters: Filters that every group must pass.
        names: Tags that the task declares.
        by_token: Whether the task has a rule for the newest token.
    """

    narrow_floats: NarrowFloats | None
    filters: Sequence[Filter]
    names: Sequence[str]
    by_token: bool

    def one(self, items: Items | GroupedRows, given: Given) -> Batch:
        """Prepare what `put` was given: one group, or an Experience with a group a row."""
        if isinstance(items, GroupedRows):
            return self.many(items.groups(), given)
        if not isinstance(items, Experience):
            group = [items] if isinstance(items, BufferItem) else _listed(items, "samples")
            return self.many([group] if group else [], given)
        check_rows(items)
        if self.filters or self.names or self.by_token:
            rows = [[item] for item in split_experience_batch(items)]
            return self._batch(rows, None if self.filters else items, given)
        return self._batch((), items, given)

    def many(self, groups: Sequence[Sequence[BufferItem]], given: Given) -> Batch:
        """Prepare several groups."""
        listed = [_listed(group, "samples") for group in _listed(groups, "lists of samples")]
        for index, group in enumerate(listed):
            for place, item in enumerate(group):
                check_sample(item, (index, place))
        return self._batch(listed, None, given)

    def _batch(
        self,
        groups: Sequence[Sequence[BufferItem]],
        experience: Experience | None,
        given: Given,
    ) -> Batch:
        """Encode groups, or the Experience whose rows they are."""
        kept: Sequence[int] = range(len(groups))
        filtered = 0
        if self.filters:
            kept, dropped = split(groups, self.filters)
            groups, filtered = [groups[place] for place in kept], len(dropped)
        version, narrow = given.policy_version, self.narrow_floats
        if experience is None:
            check_rewards(groups, kept)
            encoded = encode_groups(groups, policy_version=version, narrow_floats=narrow)
        else:
            check_row_rewards(experience.reward)
            encoded = encode_experience(experience, policy_version=version, narrow_floats=narrow)
        newest = [newest_version(group, version) for group in groups] if self.by_token else None
        tags = None
        if self.names or given.tags:
            tags = [tag_values(self.names, group, given.tags) for group in groups]
        described = _with_status(encoded, given.status)
        return Batch(described, given.priority, newest, tags, given.tags, filtered)


def _with_status(groups: list[EncodedGroup], status: AnyStatus | None) -> list[EncodedGroup]:
    if status is None:
        return groups
    return [group._replace(status=Status(status)) for group in groups]


def newest_version(group: Sequence[BufferItem], default: int | None = None) -> int | None:
    """Return the version of the newest token of the member where that is oldest.

    A group expires by its tokens when one member's tokens are all too stale. Only tokens that the
    action mask counts are looked at; a member without any never expires by them.
    """
    newest = [_newest_token(item, default) for item in group]
    known = [version for version in newest if version is not None]
    return min(known) if known else None


def _newest_token(item: BufferItem, default: int | None) -> int | None:
    versions, mask = item.token_versions, item.action_mask
    if versions is None or not versions.numel():
        return item.policy_version if item.policy_version is not None else default
    counted = versions if mask is None else versions[mask != 0]
    known = counted[counted >= 0]
    return int(known.max()) if known.numel() else None


def _listed(given: object, what: str) -> list[Any]:
    """Return what is to be put as a list, or raise RecordError."""
    if isinstance(given, list):
        return given
    if isinstance(given, _NO_LISTS) or not isinstance(given, Iterable):
        raise RecordError(
            f"a {type(given).__name__} where a list of {what} is needed: put takes a "
            "redrb.BufferItem, a list of them or a redrb.Experience, put_many a list of such lists."
        )
    return list(given)
