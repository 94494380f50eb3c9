"""`MixtureLease`: the groups that a take from several tasks returns, used as one batch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias

from redrb.connection.deadline import Deadline
from redrb.errors import ConfigError, RecordError
from redrb.experience import Experience
from redrb.experience.records import Scalar
from redrb.stream import Lease
from redrb.stream.arguments import AnyStatus
from redrb.stream.take.cause import NO_CAUSE
from redrb.stream.take.forwarding import (
    ForwardedGroup,
    ForwardOptions,
    Target,
    chosen_groups,
    store_in_turn,
)
from redrb.stream.take.lease import PartsLease, select
from redrb.stream.take.part import Chosen

ForwardedByTask: TypeAlias = (
    Sequence[ForwardedGroup] | Mapping[str, Mapping[int, ForwardedGroup]] | Experience
)
"""A group for each leased one; or by task and id; or all samples of the lease as one batch."""


class MixtureLease(PartsLease[Mapping[str, Collection[int]]]):
    """Groups taken from several tasks, task after task, held until they are ended.

    It is used like a `Lease`; each task has its own ids, so ids are given and returned by task. As
    a context manager it acknowledges at the end of the block; an exception requeues the groups and
    counts as a failed delivery, an interrupt (Ctrl-C, SystemExit) requeues them unharmed. When
    groups do not fit into one batch, the ones that differ from most go to the dead-letter stream
    of their task and the others are requeued unharmed.

    All tasks are ended together. When another consumer has taken groups of one task over, or its
    server is away, the other tasks are ended all the same, as `PartsLease` says.
    """

    @property
    def parts(self) -> dict[str, Lease]:
        """Task -> the lease on its groups, for tasks that gave a group."""
        tasks = dict.fromkeys(part.task for part in self._parts)
        return {task: Lease([part for part in self._parts if part.task == task]) for task in tasks}

    @property
    def ids(self) -> dict[str, tuple[int, ...]]:
        """Task -> ids of its groups that are still leased, in the order of the batch."""
        return {task: lease.ids for task, lease in self.parts.items() if lease}

    @property
    def tasks(self) -> list[str]:
        """Task of each group that is still leased, in the order of `groups()`."""
        return [part.task for part in self._parts for _ in part.layouts]

    @property
    def sample_tasks(self) -> list[str]:
        """Task of each sample that is still leased: of each row of `batch()`."""
        return [part.task for part in self._parts for _ in range(part.samples)]

    def forward(
        self,
        stream: Target | Mapping[str, Target],
        groups: ForwardedByTask,
        *,
        priority: float | None = None,
        status: AnyStatus | None = None,
        tags: Mapping[str, Scalar | None] | None = None,
        timeout: float | None = None,
    ) -> tuple[int | None, ...]:
        """Move groups to the next task with added fields, each exactly once.

        The groups of each task are put into their next task, then all are acknowledged, as
        `Lease.forward` does with those of one task. See docs/how-to/stages.md.

        Args:
            stream: The `ExperienceStream` of the next task; or a dict of one for each task whose
                groups are forwarded.
            groups: The samples of each leased group, in the order of `groups()`, and None for
                groups to filter; or a dict by task of dicts by id: other groups stay leased; or
                `lease.batch()` with added fields, all samples as one Experience.
            priority, status, tags: Of the puts, as in `ExperienceStream.put`.
            timeout: Seconds to wait for room in all tasks.

        Returns:
            The id of each group in its next task, in the order of `groups`; None for filtered ones.

        Raises:
            LeaseLost: Another consumer has taken groups over. It forwards those that this call has
                not stored; nothing is to be repeated.
            As `ExperienceStream.put`: the groups are still leased, and the call may be repeated.
        """
        self._check_held()
        options = ForwardOptions(priority=priority, status=status, tags=tags)
        names = [(part.task, seq) for part in self._parts for seq in part.layouts]
        samples = [layout.samples for layout in self._layouts()]
        chosen = chosen_groups(_by_name(groups), names, samples)
        tasks = {task for task, _ in chosen}
        if isinstance(stream, Mapping) and not tasks <= set(stream):
            missing = sorted(tasks.difference(stream))
            raise ConfigError(
                f"forward() has groups of tasks {missing} and no stream for them: give one for "
                "each task of the lease, or one for all."
            )
        parts = [
            (
                part,
                {(part.task, seq): seq for seq in part.layouts},
                stream[part.task] if isinstance(stream, Mapping) else stream,
            )
            for part in self._parts
            if part.task in tasks
        ]
        with Deadline(timeout):
            ids, stored = store_in_turn(parts, chosen, options)
        self._end_parts("ack", stored, NO_CAUSE)
        return tuple(ids[name] for name in chosen)

    def _select(self, ids: Mapping[str, Collection[int]]) -> Chosen:
        chosen: Chosen = []
        for task, wanted in ids.items():
            parts = [part for part in self._parts if part.task == task]
            if not any(parts):
                raise ConfigError(
                    f"groups of task {task!r} are not in this lease; it holds {self.ids}."
                )
            chosen += select(parts, wanted)
        return chosen

    def _name_misfits(self, error: RecordError, names: Collection[str] | None) -> None:
        super()._name_misfits(error, names)
        for part, ids in self._misfits:
            error.add_note(f"of task {part.task!r}: groups {list(ids)}")


def _by_name(
    groups: ForwardedByTask,
) -> Sequence[ForwardedGroup] | Mapping[tuple[str, int], ForwardedGroup] | Experience:
    """Return groups that are given by task and id as one dict."""
    if not isinstance(groups, Mapping):
        return groups
    if not all(isinstance(each, Mapping) for each in groups.values()):
        raise ConfigError(
            "groups of a mixture are named by task and id: give a dict by task of dicts by id."
        )
    return {(task, seq): group for task, each in groups.items() for seq, group in each.items()}
