"""`MixtureLease`: the groups that a take from several tasks returns, used as one batch."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from redrb.errors import ConfigError, RecordError
from redrb.stream import Lease
from redrb.stream.take.lease import Chosen, PartsLease, select


class MixtureLease(PartsLease[Mapping[str, Collection[int]]]):
    """Groups taken from several tasks, task after task, held until they are ended.

    It is used like a `Lease`; each task has its own ids, so ids are given and returned by task. As
    a context manager it acknowledges at the end of the block; an exception requeues the groups and
    counts as a failed delivery, an interrupt (Ctrl-C, SystemExit) requeues them unharmed. When
    groups do not fit into one batch, the ones that differ from most go to the dead-letter stream
    of their task and the others are requeued unharmed.

    The tasks are ended one after the other. When another consumer has taken groups of one task
    over, the other tasks are ended all the same, and `LeaseLost` names the lost one: all of them
    were trained in the same optimizer step. After `StoreUnavailable` the same call goes on with the
    tasks that are left.
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

    def _name_misfits(self, error: RecordError) -> None:
        super()._name_misfits(error)
        for part, ids in self._misfits:
            error.add_note(f"of task {part.task!r}: groups {list(ids)}")
