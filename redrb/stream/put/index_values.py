"""Reads from samples the values that a task indexes: tags and newest tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from redrb.experience import BufferItem
from redrb.stream.put.options import PutOptions
from redrb.stream.task.description import TaskDescription
from redrb.stream.task.tags import TagValue, tag_values


@dataclass(frozen=True, slots=True)
class IndexValues:
    """Values of groups, for the settings that a task had when they were prepared.

    Attributes:
        newest: Version of each group's newest token; None if no rule of the task looks at it.
        tag_names: Tags that the task declares.
        tags: Values of these tags for each group.
    """

    newest: Sequence[int | None] | None = None
    tag_names: Sequence[str] = ()
    tags: Sequence[Sequence[TagValue]] = ()

    def part(self, start: int, end: int) -> Self:
        """Return the values of some of the groups."""
        newest = None if self.newest is None else self.newest[start:end]
        return type(self)(newest, self.tag_names, self.tags[start:end])


NO_VALUES = IndexValues()


def reads_samples(description: TaskDescription, options: PutOptions) -> bool:
    """Return whether `index_values` must look at the samples of groups."""
    return bool(description.tags or options.tags or description.by_token)


def index_values(
    description: TaskDescription, groups: Sequence[Sequence[BufferItem]], options: PutOptions
) -> IndexValues:
    """Return the values that a task indexes.

    Raises:
        ConfigError: `options` have a tag that the task does not declare.
        RecordError: A tag of the samples cannot be indexed.
    """
    newest, names = None, description.tags
    tags: list[list[TagValue]] = []
    if description.by_token:
        newest = [_newest_version(group, options.policy_version) for group in groups]
    if names or options.tags:
        tags = [tag_values(names, group, options.tags) for group in groups]
    return IndexValues(newest, names, tags)


def _newest_version(group: Sequence[BufferItem], default: int | None) -> int | None:
    """Return the version of the newest token of the sample in which that version is oldest."""
    # A group expires by its tokens when all tokens of one sample are too stale. Only tokens that
    # the action mask counts are looked at; a sample without such tokens never expires by them.
    newest = [_newest_token(item, default) for item in group]
    known = [version for version in newest if version is not None]
    return min(known) if known else None


def _newest_token(item: BufferItem, default: int | None) -> int | None:
    versions, mask = item.token_versions, item.action_mask
    if versions is None or not versions.numel():
        return item.policy_version if item.policy_version is not None else default
    versions = versions.long()
    counted = versions if mask is None else versions.masked_fill(mask == 0, -1)
    newest = int(counted.max())
    return newest if newest >= 0 else None
