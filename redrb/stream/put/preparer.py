"""From the items of a put to a `PutBatch`: checked once, filtered, encoded, indexed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from redrb.codec import (
    EncodedGroup,
    NarrowFloats,
    check_and_encode_groups,
    encode_experience,
    encode_groups,
)
from redrb.experience import BufferItem, Experience, split_experience_batch
from redrb.experience.checking import check_batch, check_groups
from redrb.orders import ignores_priority
from redrb.stream.put.batch import PutBatch
from redrb.stream.put.filters import Filter, passing
from redrb.stream.put.index_values import NO_VALUES, index_values, reads_samples
from redrb.stream.put.items import Groups
from redrb.stream.put.options import PutOptions
from redrb.stream.task.description import TaskDescription
from redrb.stream.task.task import Task

_log = logging.getLogger("redrb")


class Preparer:
    """Prepares groups for one task; safe among threads."""

    def __init__(
        self, task: Task, narrow_floats: NarrowFloats | None, filters: Sequence[Filter]
    ) -> None:
        """Make a preparer.

        Args:
            task: The task.
            narrow_floats: Dtype for float bodies, see `ExperienceStream`.
            filters: Filters that every group must pass.
        """
        self._task = task
        self._narrow_floats = narrow_floats
        self._filters = filters
        self._warned = False

    def prepare(self, groups: Groups, options: PutOptions) -> PutBatch:
        """Check, filter and encode groups, and take the values from them that the task indexes.

        Raises:
            RecordError: A sample is malformed, a reward of a group that passes the filters is not
                finite, or a tag cannot be indexed.
            EncodeError: The wire format cannot hold a group.
            ConfigError: A tag of `options` is not declared, or a filter is broken.
        """
        description = self._task.description
        if options.tags and not options.tags.keys() <= set(description.tags):
            self._task.reopen()  # another process may have declared these tags since
            description = self._task.description
        if options.priority is not None:
            self._warn_of_priorities(description)
        reads = reads_samples(description, options)
        filtered = 0
        if self._filters:
            groups, filtered = self._passing(groups)
            encoded = self._encode(encode_groups, groups, options)
        elif isinstance(groups, Experience):
            for bad_reward in check_batch(groups).values():
                raise bad_reward
            encoded = self._encode(encode_experience, groups, options)  # keeps its padding
            groups = [[item] for item in split_experience_batch(groups)] if reads else []
        else:
            encoded = self._encode(check_and_encode_groups, groups, options)
        if options.status is not None:
            encoded = [group._replace(status=options.status) for group in encoded]
        values = index_values(description, groups, options) if reads else NO_VALUES
        return PutBatch(encoded, description.revision, options, values, filtered)

    def _encode(
        self, encode: Callable[..., list[EncodedGroup]], groups: Groups, options: PutOptions
    ) -> list[EncodedGroup]:
        return encode(
            groups, policy_version=options.policy_version, narrow_floats=self._narrow_floats
        )

    def _passing(self, groups: Groups) -> tuple[list[list[BufferItem]], int]:
        """Return the groups that pass the filters, and how many do not."""
        if isinstance(groups, Experience):
            bad_rewards = check_batch(groups)
            groups = [[item] for item in split_experience_batch(groups)]
        else:
            bad_rewards = check_groups(groups)
        kept = passing(groups, self._filters)
        for index in kept:
            if index in bad_rewards:
                raise bad_rewards[index]
        return [groups[index] for index in kept], len(groups) - len(kept)

    def _warn_of_priorities(self, description: TaskDescription) -> None:
        """Warn, once, that the task's order does not look at priorities."""
        if self._warned or not ignores_priority(description.order):
            return
        self._warned = True
        _log.warning(
            "task %r: priorities are stored, but its order does not go by them: open it with "
            'order="priority" or "prioritized", or put without priority=',
            self._task.name,
        )
