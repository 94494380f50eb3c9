"""`Task`: what a task holds, and what is done to it besides putting and taking."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from redrb.checks import checked_int, checked_int_or_none, checked_number
from redrb.connection import Client
from redrb.errors import ConfigError, TaskMismatch
from redrb.experience import BufferItem, Status
from redrb.keys import TaskKeys, check_name
from redrb.stream.arguments import (
    BEFORE_ANY,
    AnyStatus,
    checked_ids,
    checked_status,
    checked_statuses,
)
from redrb.stream.put.indexing import Indexer
from redrb.stream.saving.saving import AnyPath, SavedTask, resume_task, save_task
from redrb.stream.task.dead_letters import DeadLetter, dead_letters
from redrb.stream.task.expiration import Expiration, Rules, StalenessReport
from redrb.stream.task.history import StoredGroup, history, read_groups
from redrb.stream.task.ledger import StreamStats
from redrb.stream.task.queries import parse_where
from redrb.stream.task.reprioritizing import Reprioritizer
from redrb.stream.task.scripts import TaskScripts
from redrb.stream.task.settings import OnExpired, TaskSettings
from redrb.stream.task.store import TaskStore

WIRE_FORMAT = 1
"""Version of the layout of keys and scripts that a task remembers."""


class Task:
    """A task as one consumer group sees it; `ExperienceStream` adds what puts and takes.

    Nothing here needs a heartbeat or an identity of its own, so all of it works as long as the
    client is open.
    """

    def __init__(
        self, client: Client, task: str, *, namespace: str, group: str, settings: TaskSettings
    ) -> None:
        """Open a task, and create it when it is new; see `ExperienceStream`."""
        if not isinstance(client, Client):
            raise ConfigError(
                f"the client is a {type(client).__name__}: pass what redrb.connect(url) returns."
            )
        self.task = task
        self.namespace = namespace
        self.group = check_name("consumer group", group)
        self._settings = settings
        self._asked = settings.as_stored()
        self._store = TaskStore(client, task, TaskKeys.of(namespace, task))
        self._scripts = TaskScripts(self._store)
        self._open()

    def __repr__(self) -> str:
        where = self._store.client.where
        return f"<redrb.{type(self).__name__} {self.namespace}:{self.task} at {where}>"

    def __bool__(self) -> bool:
        """Return True, however many groups wait."""
        return True

    def __len__(self) -> int:
        """Return the number of groups that wait for this consumer group, in whatever status."""
        return self.stats().ledger.waiting

    def count(
        self, status: AnyStatus = Status.COMPLETED, where: Mapping[str, Any] | None = None
    ) -> int:
        """Return how many groups wait for this consumer group in a status, and change nothing.

        One that has not joined yet is told what it would see: all that is stored in that status.

        Raises:
            ConfigError: The query names a tag that the task does not declare.
        """
        return self._scripts.count(self.group, checked_status(status), self._query(where))

    def counts(self) -> dict[Status, int]:
        """Return how many groups wait in each status."""
        return {status: self.count(status) for status in Status}

    def stats(self) -> StreamStats:
        """Return counters and ledger from one consistent look."""
        return StreamStats.of(self._scripts.stats(self.group))

    def staleness(self, current_version: int | None = None) -> StalenessReport:
        """Return how stale groups are that wait, that are leased, and that were taken.

        Raises:
            ConfigError: No current version is known, or the task does not index versions.
        """
        return self._expiry.report(
            checked_int_or_none("current_version", current_version, BEFORE_ANY)
        )

    def read(self, ids: Sequence[int]) -> list[StoredGroup | None]:
        """Return groups by id without taking them, in the order of `ids`; None for those gone.

        Groups that were acknowledged are there as long as the task keeps them.
        """
        return read_groups(self._store, checked_ids(ids))

    def history(
        self, *, since: datetime | None = None, until: datetime | None = None
    ) -> Iterator[StoredGroup]:
        """Yield acknowledged groups that the task keeps, in the order of their acknowledgement.

        Args:
            since: Acknowledged then or later; times without a zone are local.
            until: Acknowledged before.
        """
        for name, time in (("since", since), ("until", until)):
            if not (time is None or isinstance(time, datetime)):
                raise ConfigError(f"{name}={time!r:.80}: give a datetime.datetime.")
        return history(self._store, since, until)

    def dead_letters(self, count: int = 100) -> list[DeadLetter]:
        """Return the newest `count` groups of the dead-letter stream, newest first."""
        return dead_letters(self._store, checked_int("count", count))

    def advance(self, version: int) -> int:
        """Tell the task the newest weight version; with `weights=` it learns it by itself.

        Returns:
            The version that the task knows now: it never goes back.
        """
        return self._scripts.advance(checked_int("version", version))

    def move(self, ids: Iterable[int], status: AnyStatus) -> int:
        """Move waiting groups to another status, each in one atomic step.

        Returns:
            How many of them wait there now; those that are leased or gone are left alone.
        """
        return self._scripts.move(self.group, checked_status(status), checked_ids(ids))

    def update_priority(self, ids: Sequence[int], priorities: Sequence[float]) -> int:
        """Change the priority of groups, waiting or leased, and with it their place in the order.

        Returns:
            How many of them are stored.

        Raises:
            ConfigError: The numbers of ids and priorities differ, or one is not usable.
        """
        if isinstance(priorities, str | bytes | Mapping) or not isinstance(priorities, Iterable):
            raise ConfigError(f"priorities={priorities!r:.80}: give one number an id, in a list.")
        numbers = [checked_number("priority", priority) for priority in priorities]
        if self._order is None or self._store.indexer is None:
            self._open()  # somebody may have made it another task
        found = Reprioritizer(self._store, self._order).update(checked_ids(ids), numbers)
        if found is None:
            self._open()
            found = Reprioritizer(self._store, self._order).update(checked_ids(ids), numbers)
        return found or 0

    def expire(
        self,
        current_version: int | None = None,
        *,
        max_staleness: int | None = None,
        max_token_staleness: int | None = None,
        statuses: Sequence[AnyStatus] = (Status.COMPLETED,),
        on_expired: OnExpired | Callable[[list[BufferItem]], object] | None = None,
    ) -> int:
        """Expire the waiting groups that are too stale; costs what expires, not what is stored.

        Args:
            current_version: Newest weight version; default: the one that the task knows.
            max_staleness, max_token_staleness: Rules; default: the task's own.
            statuses: Pools to look at.
            on_expired: "discard", "keep" (they wait with status EXPIRED), or a function that is
                told each group before it is discarded; default: the task's own setting.

        Returns:
            How many groups expired for this consumer group.

        Raises:
            ConfigError: No version or no rule is known, or the task does not index versions.
        """
        version = checked_int_or_none("current_version", current_version, BEFORE_ANY)
        rules = Rules(
            checked_int_or_none("max_staleness", max_staleness),
            checked_int_or_none("max_token_staleness", max_token_staleness),
        )
        return self._expiry.expire(version, rules, checked_statuses(statuses), on_expired)

    def save(self, path: AnyPath) -> SavedTask:
        """Save the task, all its consumer groups included, to a file; see docs/saving.md.

        Others may go on meanwhile: what is stored from the beginning to the end is saved, once.
        Memory does not grow with the task.

        Raises:
            ConfigError: The file cannot be written.
            StoreUnavailable: Redis stayed away; an older file is as it was.
        """
        return save_task(self._store, path)

    def resume(self, path: AnyPath) -> SavedTask:
        """Fill this task, into which nothing was ever put, from a file.

        It is what it was, and what was leased waits. Settings that nobody has given are those of
        the file.

        Raises:
            ConfigError: The file cannot be read, or the task was used.
            TaskMismatch: The task has another order or other tags.
            DecodeError: The file is damaged, or of a newer format.
            All of them: nothing was changed.
            StoreUnavailable: Redis stayed away; so too, unless `uncertain` is set.
        """
        resumed = resume_task(self._store, path)
        self._open()
        return resumed

    def drop_group(self) -> int:
        """Remove this consumer group, with its leases and its ledger.

        Returns:
            Groups that were deleted because no other consumer group needs them.
        """
        return self._scripts.drop_group(self.group)

    def clear(self) -> int:
        """Delete the task: all its groups, leases, dead letters, ledger and settings.

        Whoever goes on using it starts an empty one, with the settings he gave.

        Returns:
            Groups that were stored.
        """
        return self._scripts.clear()

    def _query(self, where: Mapping[str, Any] | None) -> str:
        return "" if where is None else parse_where(where, self._tags)

    def _open(self) -> None:
        """Create the task where it is gone, and learn what it is."""
        try:
            stored = self._scripts.open({"format": str(WIRE_FORMAT), **self._asked})
        except TaskMismatch as error:
            if "tags" in error.differences and not self._settings.tags:
                error.add_note("tags=[] asks for a task without tags: leave it out to use those.")
            raise
        self._learn(stored)

    def _learn(self, stored: Mapping[str, str]) -> None:
        """Note what a task is that was opened."""
        self._tags = tuple(json.loads(stored["tags"] or "[]"))
        self._order = self._settings.chosen_order(stored["order"])
        self._store.indexer = Indexer(self._order, self._tags) if stored["indexed"] else None
        self._expiry = Expiration(self._store, self.group, stored)
