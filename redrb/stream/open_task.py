"""`OpenTask`: an open task is looked at, changed, saved and deleted; nothing is taken from it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice, starmap
from typing import Any, Unpack

from redrb.checks import checked_int, checked_int_or_none, checked_number
from redrb.errors import ConfigError
from redrb.experience import BufferItem, Status
from redrb.stream.arguments import (
    BEFORE_ANY,
    AnyStatus,
    checked_ids,
    checked_letters,
    checked_status,
    checked_statuses,
)
from redrb.stream.saving.resuming import resume
from redrb.stream.saving.saving import AnyPath, SavedTask, save
from redrb.stream.task.dead_letters import (
    DeadLetter,
    drop_letters,
    letters_in,
    requeue,
    with_samples,
)
from redrb.stream.task.description import StalenessRules
from redrb.stream.task.expiration import Expiration, StalenessReport
from redrb.stream.task.groups import (
    StoredGroup,
    move,
    read_groups,
    settle,
    update_priorities,
)
from redrb.stream.task.ledger import StreamStats
from redrb.stream.task.lookup import count_waiting, stats_of
from redrb.stream.task.queries import parse_where
from redrb.stream.task.settings import OnExpired, SettingArguments
from redrb.stream.task.stored_settings import StoredSettings, check_changes
from redrb.stream.task.task import Task
from redrb.weights.wire.calls import Advance
from redrb.words import counted

_log = logging.getLogger("redrb")


class OpenTask:
    """An open task as one consumer group sees it; each method checks its arguments."""

    task: str
    namespace: str
    group: str

    def __init__(self, task: Task, group: str) -> None:
        self._task, self._store = task, task.store
        self._expiration = Expiration(task, group)
        self._closed = False

    @property
    def incarnation(self) -> str:
        """Random name that the task got when it was created.

        After Redis lost its data, or the task was cleared, it is created anew with another name,
        and its ids begin anew: an id names a group only together with the incarnation.
        """
        return self._task.description.incarnation

    def settle(self, trained: Mapping[int, int], *, incarnation: str) -> int:
        """Acknowledge groups by id, leased or waiting, when a run resumes from a checkpoint.

        A run may die between its checkpoint and its acknowledgements. The groups that the
        checkpoint has trained then wait again, or are leased by the dead run; this call prevents
        that they are taken a second time.

        Groups whose ids may be those of other groups by now are not acknowledged, and a warning
        says how many: all of them when the task was created anew since, as by a resume from a file.

        Args:
            trained: Samples of each group that the checkpoint has trained, by the group's id.
            incarnation: `lease.incarnation` of the lease on these groups.

        Returns:
            How many of them were not acknowledged yet.

        Raises:
            StoreUnavailable: Redis stayed away.
        """
        self._check_open()
        if not isinstance(incarnation, str):
            raise ConfigError(f"incarnation={incarnation!r:.80}: give lease.incarnation.")
        if not isinstance(trained, Mapping):
            raise ConfigError(
                f"trained={trained!r:.80}: give the samples of each group, by its id."
            )
        checked_ids(list(trained))
        settled = settle(self._store, self.group, trained, incarnation)
        if settled.refused:
            _log.warning(
                "task %r: %s that a checkpoint has trained cannot be acknowledged, because "
                "the task was created anew since: their ids may be those of other groups now",
                self.task,
                counted(settled.refused, "group"),
            )
        return settled.acknowledged

    def count(
        self, status: AnyStatus = Status.COMPLETED, where: Mapping[str, Any] | None = None
    ) -> int:
        """Return how many groups wait for this consumer group in a status; changes nothing.

        For a consumer group that has not joined these are all stored groups of that status. With a
        query Redis looks at all groups of the status, 1 to 3 microseconds each, a page at a time:
        the number is exact while none comes or goes.

        Raises:
            ConfigError: The query names a tag that the task does not declare.
        """
        checked, query = checked_status(status), self._query(where)
        return count_waiting(self._store, self.group, checked, query)

    def counts(self) -> dict[Status, int]:
        """Return how many groups wait in each status."""
        return {status: self.count(status) for status in Status}

    def stats(self) -> StreamStats:
        """Return ledger and counters, all from one moment."""
        return stats_of(self._store, self.group)

    def staleness(self, current_version: int | None = None) -> StalenessReport:
        """Return how stale the waiting, the leased and the taken groups are.

        Groups that were put without a version are not counted. For a consumer group that has not
        joined, all groups wait that it would find. Tasks with `max_staleness` or the order
        "stalest" have an index of versions; in others every stored group is looked at.

        Args:
            current_version: Newest weight version; default: the one that the task knows.

        Raises:
            ConfigError: No current version is known.
        """
        version = checked_int_or_none("current_version", current_version, BEFORE_ANY)
        return self._expiration.report(version)

    def read(self, ids: Sequence[int]) -> list[StoredGroup | None]:
        """Return groups by id without taking them, in the order of `ids`; None for a deleted one.

        Acknowledged groups are found while another consumer group needs them.
        """
        return read_groups(self._task, checked_ids(ids))

    def dead_letters(self, count: int = 100) -> list[DeadLetter]:
        """Return the newest `count` groups of the dead-letter stream, newest first."""
        letters = islice(letters_in(self._store), checked_int("count", count))
        return list(starmap(with_samples, letters))

    def requeue(self, ids: Iterable[int]) -> dict[int, int]:
        """Put dead letters of this consumer group again, for it alone, in the order of their ids.

        A letter is requeued once, however many callers ask. Its group has a new id, and by that a
        new place of arrival; status, priority, versions and tags are as they were, and failed
        deliveries and reads begin at 0. `redrb inspect` shows its first id, and `lease.forward`
        knows it by that. It waits although the task is at its limit: puts wait until there is
        room. In the ledger it is waiting instead of dead. A group that is too stale expires, as any
        other.

        Args:
            ids: Ids that the groups had, as `dead_letters` returns them.

        Returns:
            The new id of each group that this call has requeued, by the id of its letter. Ids
            without a letter of this consumer group, and letters without a payload, are left out.
            Letters of a table's claims of which a row was cleared are deleted, and count as
            evicted.

        Raises:
            ConfigError: The task has another order since a letter was given up, and Redis cannot
                compute the scores of this order, as those of an `Order` object.
        """
        return requeue(self._store, self.group, checked_letters(ids))

    def drop_dead_letters(self, ids: Iterable[int]) -> int:
        """Delete dead letters of this consumer group for good; they still count as dead.

        Args:
            ids: Ids as for `requeue`; 0 stands for all groups in parts that were never put.

        Returns:
            How many letters this call has deleted.
        """
        return drop_letters(self._store, self.group, checked_ids(ids, 0))

    def settings(self) -> StoredSettings:
        """Return the settings that the task has now, and who changed which when.

        Raises:
            UnknownTask: There is no such task, because it was cleared.
        """
        return self._task.stored_settings()

    def configure(self, **changes: Unpack[SettingArguments]) -> StoredSettings:
        """Change settings of the task, in one atomic step, while others work on it.

        All processes go by the new settings from their next call on. The settings that the task is
        to have are checked together, as when it is opened. None removes a setting. Every setting
        but `max_reads` can change, `order` while no group is stored;
        docs/how-to/change-settings.md says what becomes of the groups that are stored.

        Args:
            changes: Fields of `TaskSettings`, such as `limit=8192` or `max_staleness=None`.

        Returns:
            The settings that the task has then.

        Raises:
            ConfigError: A setting cannot change or have this value; nothing was changed.
            StoreUnavailable: Redis stayed away; the settings may have been changed.
        """
        self._check_open()
        check_changes(changes)
        self._task.configure(changes)
        if changes.keys() & {"max_staleness", "max_token_staleness"}:
            self._task.log_unbounded(self._task.description.staleness)
        return self.settings()

    def advance(self, version: int) -> int:
        """Give the task the newest weight version; not needed with `weights=`.

        Returns:
            The version that the task knows now, which never goes back.
        """
        return self._store.call(Advance(checked_int("version", version)))

    def move(self, ids: Iterable[int], status: AnyStatus) -> int:
        """Move waiting groups to another status, each in one atomic step.

        Returns:
            How many of them wait in that status now; leased and deleted groups are left alone.
        """
        return move(self._store, self.group, checked_status(status), checked_ids(ids))

    def update_priority(self, ids: Sequence[int], priorities: Sequence[float]) -> int:
        """Change the priority of groups, waiting or leased, and with it their place in the order.

        Returns:
            How many of them are stored.

        Raises:
            ConfigError: There is not one priority for each id, or a priority is not usable.
        """
        if isinstance(priorities, str | bytes | Mapping) or not isinstance(priorities, Iterable):
            raise ConfigError(f"priorities={priorities!r:.80}: give one number an id, in a list.")
        numbers = [checked_number("priority", priority) for priority in priorities]
        wanted = checked_ids(ids)
        if len(wanted) != len(numbers):
            raise ConfigError(f"{len(wanted)} ids and {len(numbers)} priorities: give one each.")
        return update_priorities(self._task, list(zip(wanted, numbers, strict=True)))

    def expire(
        self,
        current_version: int | None = None,
        *,
        max_staleness: int | None = None,
        max_token_staleness: int | None = None,
        statuses: Sequence[AnyStatus] = (Status.COMPLETED,),
        on_expired: OnExpired | Callable[[list[BufferItem]], object] | None = None,
    ) -> int:
        """Expire the waiting groups that are too stale; its cost depends only on their number.

        Args:
            current_version: Newest weight version; default: the one that the task knows.
            max_staleness, max_token_staleness: Rules; default: those of the task.
            statuses: Statuses of the groups.
            on_expired: "discard", "keep" (they wait with status EXPIRED), or a function that is
                called with each group's samples before the group is discarded; default: the
                setting of the task.

        Returns:
            How many groups expired for this consumer group.

        Raises:
            ConfigError: No version or no rule is known, or the task does not index versions.
        """
        version = checked_int_or_none("current_version", current_version, BEFORE_ANY)
        rules = StalenessRules(
            checked_int_or_none("max_staleness", max_staleness),
            checked_int_or_none("max_token_staleness", max_token_staleness),
        )
        return self._expiration.expire(version, rules, checked_statuses(statuses), on_expired)

    def save(self, path: AnyPath) -> SavedTask:
        """Save the task with all its consumer groups: docs/how-to/backup-and-restore.md.

        Other processes may go on meanwhile: every group that is stored from the beginning to the
        end is saved, once. Memory does not grow with the task.

        Raises:
            ConfigError: The file cannot be written.
            StoreUnavailable: Redis stayed away; an older file is unchanged.
        """
        return save(self._store, path)

    def resume(self, path: AnyPath) -> SavedTask:
        """Put the groups of a file into this task, which must be empty, in their order.

        Leased groups wait again. Settings that this task was not given are those of the file; ids
        and counters begin anew. Each group is put once: a call that broke off midway is repeated,
        and goes on. Resume before workers use the task: they get the groups as they come.

        Raises:
            ConfigError: The file cannot be read, the task holds groups, or was deleted meanwhile.
            TaskMismatch: The task has another order or other tags.
            DecodeError: The file is damaged, or of another format.
            StoreUnavailable: Redis stayed away; the same call goes on.
        """
        resumed = resume(self._store, path)
        self._task.reopen()
        return resumed

    def drop_group(self) -> int:
        """Remove this consumer group, with its leases and its ledger.

        Returns:
            Groups that were deleted because no other consumer group needs them.
        """
        return self._task.drop_group(self.group)

    def clear(self) -> int:
        """Delete the task, in one atomic step: groups, leases, dead letters, ledger and settings.

        Puts and takes that wait notice at once, or within a second if there are many.

        A stream object that goes on using it creates an empty task with the settings that the
        object was given; with `weights=` this one does so at once, to keep learning versions.

        Returns:
            Groups that were stored.
        """
        return self._task.clear()

    def _query(self, where: Mapping[str, Any] | None) -> str:
        if where is None:
            return ""
        try:
            return parse_where(where, self._task.description.tags)
        except ConfigError:
            self._task.reopen()  # another process may have declared its tags since
            return parse_where(where, self._task.description.tags)

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError(
                f"this stream of task {self.task!r} is closed: open another ExperienceStream."
            )
