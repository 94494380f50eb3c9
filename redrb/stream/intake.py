"""What a put is given: checked, filtered and encoded, with what an indexed task wants to know."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import Tensor

from redrb.codec import EncodedGroup, encode_experience, encode_groups
from redrb.errors import ConfigError, RecordError
from redrb.experience import BufferItem, Experience, Status, split_experience_batch
from redrb.experience.padding import ACTION_FIELDS, SEQUENCE_FIELDS, check_aligned
from redrb.experience.records import Scalar, named_tensors
from redrb.stream.batch import Batch
from redrb.stream.filters import Filter, split
from redrb.stream.tags import tag_values

Items: TypeAlias = BufferItem | Sequence[BufferItem] | Experience
NarrowFloats: TypeAlias = Literal["float16", "bfloat16"]

ALIGNED_FIELDS = (*SEQUENCE_FIELDS, *ACTION_FIELDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What a put says of all its groups; None: nothing, or what their samples say."""

    policy_version: int | None = None
    priority: float | None = None
    status: Status | None = None
    tags: Mapping[str, Scalar | None] | None = None

    def __post_init__(self) -> None:
        if self.priority is not None and not math.isfinite(self.priority):
            raise ConfigError(f"priority={self.priority}: it must be a finite number.")
        if self.status is not None and self.status not in set(Status):
            known = ", ".join(Status)
            raise ConfigError(f"there is no status {self.status!r}: use one of {known}.")


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

    def one(self, items: Items, given: Given) -> Batch:
        """Prepare what `put` was given: one group, or an Experience with a group a row."""
        if not isinstance(items, Experience):
            group = [items] if isinstance(items, BufferItem) else items
            return self.many([group] if len(group) else [], given)
        check_aligned({name: row.shape[1:] for name, row in named_tensors(items).items()})
        if self.filters or self.names or self.by_token:
            rows = [[item] for item in split_experience_batch(items)]
            return self._batch(rows, None if self.filters else items, given)
        return self._batch((), items, given)

    def many(self, groups: Sequence[Sequence[BufferItem]], given: Given) -> Batch:
        """Prepare several groups."""
        for index, group in enumerate(groups):
            for item in group:
                _check_item(item, index)
        return self._batch(groups, None, given)

    def _batch(
        self,
        groups: Sequence[Sequence[BufferItem]],
        experience: Experience | None,
        given: Given,
    ) -> Batch:
        """Encode groups, or the Experience whose rows they are."""
        filtered = 0
        if self.filters:
            kept, dropped = split(groups, self.filters)
            groups, filtered = [groups[place] for place in kept], len(dropped)
        version, narrow = given.policy_version, self.narrow_floats
        if experience is None:
            encoded = encode_groups(groups, policy_version=version, narrow_floats=narrow)
        else:
            encoded = encode_experience(experience, policy_version=version, narrow_floats=narrow)
        newest = [_newest(group, version) for group in groups] if self.by_token else None
        tags = None
        if self.names or given.tags:
            tags = [tag_values(self.names, group, given.tags) for group in groups]
        return Batch(_with_status(encoded, given.status), given.priority, newest, tags, filtered)


def _with_status(groups: list[EncodedGroup], status: Status | None) -> list[EncodedGroup]:
    if status is None:
        return groups
    return [group._replace(status=Status(status)) for group in groups]


def _newest(group: Sequence[BufferItem], default: int | None) -> int | None:
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


def _check_item(item: object, group: int) -> None:
    """Refuse what is no sample, or one whose fields do not fit each other."""
    if not isinstance(item, BufferItem):
        raise RecordError(
            f"group {group} holds a {type(item).__name__}: a group is a list of redrb.BufferItem, "
            "and put_many takes a list of such lists."
        )
    shapes = {
        name: tensor.shape
        for name in ALIGNED_FIELDS
        if isinstance(tensor := getattr(item, name), Tensor)
    }
    check_aligned(shapes, where=f" in group {group}")
