"""From the items of a put to a `PutBatch`: checked once, filtered, encoded, described."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from redrb.codec import EncodedGroup, NarrowFloats, encode_experience, encode_groups
from redrb.errors import RecordError
from redrb.experience import BufferItem, Experience, split_experience_batch
from redrb.experience.checking import check_batch, check_groups
from redrb.stream.put.batch import PutBatch
from redrb.stream.put.filters import Filter, passing
from redrb.stream.put.items import Groups
from redrb.stream.put.newest_token import newest_version
from redrb.stream.put.options import PutOptions
from redrb.stream.task.tags import tag_values


@dataclass(frozen=True, slots=True)
class Preparer:
    """Prepares groups for one task.

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

    def prepare(self, groups: Groups, options: PutOptions) -> PutBatch:
        """Check, filter and encode groups, and read from them what the task indexes.

        Raises:
            RecordError: A sample is malformed, a reward of a group that passes the filters is not
                finite, or a tag cannot be indexed.
            EncodeError: The wire format cannot hold a group.
            ConfigError: A tag of `options` is not declared, or a filter is broken.
        """
        if isinstance(groups, Experience):
            return self._prepare_rows(groups, options)
        filtered, bad_rewards = 0, check_groups(groups)
        if self.filters or bad_rewards:
            groups, filtered = self._passing(groups, bad_rewards)
        encoded = encode_groups(
            groups, policy_version=options.policy_version, narrow_floats=self.narrow_floats
        )
        return self._batch(encoded, groups, options, filtered)

    def _prepare_rows(self, experience: Experience, options: PutOptions) -> PutBatch:
        """Prepare a batch whose rows are groups; it is split only where samples are looked at."""
        bad_rewards = check_batch(experience)
        groups: list[list[BufferItem]] = []
        if self.filters or self.names or self.by_token:
            groups = [[item] for item in split_experience_batch(experience)]
        version, narrow = options.policy_version, self.narrow_floats
        if self.filters:
            groups, filtered = self._passing(groups, bad_rewards)
            encoded = encode_groups(groups, policy_version=version, narrow_floats=narrow)
            return self._batch(encoded, groups, options, filtered)
        for error in bad_rewards.values():
            raise error
        encoded = encode_experience(experience, policy_version=version, narrow_floats=narrow)
        return self._batch(encoded, groups, options, 0)

    def _passing(
        self, groups: list[list[BufferItem]], bad_rewards: Mapping[int, RecordError]
    ) -> tuple[list[list[BufferItem]], int]:
        """Return the groups that pass the filters, and how many do not."""
        kept = passing(groups, self.filters) if self.filters else range(len(groups))
        for index in kept:
            if index in bad_rewards:
                raise bad_rewards[index]
        return [groups[index] for index in kept], len(groups) - len(kept)

    def _batch(
        self,
        encoded: list[EncodedGroup],
        groups: Sequence[Sequence[BufferItem]],
        options: PutOptions,
        filtered: int,
    ) -> PutBatch:
        """Return encoded groups with the values that the task indexes of their samples."""
        newest = tags = None
        if self.by_token:
            newest = [newest_version(group, options.policy_version) for group in groups]
        if self.names or options.tags:
            tags = [tag_values(self.names, group, options.tags) for group in groups]
        if options.status is not None:
            encoded = [group._replace(status=options.status) for group in encoded]
        return PutBatch(encoded, options, newest, tags, filtered)
