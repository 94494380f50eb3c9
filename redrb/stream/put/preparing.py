"""What a put is given: checked, filtered and encoded, with what an indexed task wants to know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from redrb.codec import EncodedGroup, NarrowFloats, encode_experience, encode_groups
from redrb.experience import BufferItem, Experience, Status, split_experience_batch
from redrb.experience.checking import check_rewards, check_row_rewards, check_rows, check_sample
from redrb.stream.arguments import AnyStatus
from redrb.stream.put.batch import PutBatch
from redrb.stream.put.filters import Filter, split
from redrb.stream.put.items import GroupedRows, Items, listed
from redrb.stream.put.newest_token import newest_version
from redrb.stream.put.options import PutOptions
from redrb.stream.task.tags import tag_values


@dataclass(frozen=True, slots=True)
class Preparer:
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

    def one(self, items: Items | GroupedRows, given: PutOptions) -> PutBatch:
        """Prepare what `put` was given: one group, or an Experience with a group a row."""
        if isinstance(items, GroupedRows):
            return self.many(items.groups(), given)
        if not isinstance(items, Experience):
            group = [items] if isinstance(items, BufferItem) else listed(items, "samples")
            return self.many([group] if group else [], given)
        check_rows(items)
        if self.filters or self.names or self.by_token:
            rows = [[item] for item in split_experience_batch(items)]
            return self._batch(rows, None if self.filters else items, given)
        return self._batch((), items, given)

    def many(self, groups: Sequence[Sequence[BufferItem]], given: PutOptions) -> PutBatch:
        """Prepare several groups."""
        checked = [listed(group, "samples") for group in listed(groups, "lists of samples")]
        for index, group in enumerate(checked):
            for place, item in enumerate(group):
                check_sample(item, (index, place))
        return self._batch(checked, None, given)

    def _batch(
        self,
        groups: Sequence[Sequence[BufferItem]],
        experience: Experience | None,
        given: PutOptions,
    ) -> PutBatch:
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
        return PutBatch(described, given.priority, newest, tags, given.tags, filtered)


def _with_status(groups: list[EncodedGroup], status: AnyStatus | None) -> list[EncodedGroup]:
    if status is None:
        return groups
    return [group._replace(status=Status(status)) for group in groups]
