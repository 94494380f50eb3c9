"""The tasks of one buffer: a stream for each, and a set in Redis with the names of all tasks.

Redis may lose the set, with the tasks or, on a cluster, without them. So a process enters a name
again when its stream creates the task anew, when it looks for the names of all, and now and then.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias

from redrb.checks import check_choice, checked_int_or_none
from redrb.compat.xtuner.runs import Run
from redrb.connection import Client, check_client
from redrb.experience import Status
from redrb.keys import check_name, is_name, replay_key
from redrb.stream import ExperienceStream
from redrb.stream.take.part import Expiry
from redrb.stream.take.rollout_reading import as_stored
from redrb.stream.task.calls import Stats
from redrb.stream.task.settings import NO_BOUND
from redrb.stream.task.store import TaskStore
from redrb.stream.task.tags import declare_tags
from redrb.unpacking import Reading

ReplayOrder: TypeAlias = Literal["fifo", "stalest"]

GROUP = "replay"
"""Consumer group of all buffers."""

ENTER_AGAIN_S = 10.0
"""Time after which a call enters the names of the streams again."""

STREAM_ORDERS = {"fifo": "fifo", "stalest": "priority"}


class _Stream(ExperienceStream):
    """The stream of one task, which enters its name now and whenever it creates the task anew."""

    def __init__(self, enter_name: Callable[[], None], *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        enter_name()
        self._task.enter_name = enter_name


class Tasks:
    """Streams of one namespace, opened at their first use and kept; thread-safe.

    Attributes:
        run: The run that the groups are of; None: nobody asks.
    """

    def __init__(
        self,
        client: Client,
        namespace: str,
        order: ReplayOrder,
        lease_ms: int,
        *,
        tags: Sequence[str] | None = None,
        limit: int | None = None,
        run: str | None = None,
    ) -> None:
        check_client(client)
        check_choice("order", order, list(STREAM_ORDERS))
        self.client = client
        self.namespace = check_name("namespace", namespace)
        self.order = order
        self.stream_order = STREAM_ORDERS[order]
        self.limit = checked_int_or_none("limit", limit, 1)
        self._tags = None if tags is None else declare_tags(tags)
        self._lease_ms = lease_ms
        self._lock = threading.Lock()
        self._entered = time.monotonic()
        self._streams: dict[str, ExperienceStream] = {}
        self._stores: dict[str, TaskStore] = {}
        self.run = None if run is None else Run(client, namespace, run, held=self._held)
        self._names = replay_key(namespace)
        self._names_client = client.at(self._names)

    def enter(self) -> bool:
        """Do what `Run.enter` does; False without a run."""
        return self.run is not None and self.run.enter()

    def open(self, task: str, *, of_any_run: bool = False) -> ExperienceStream:
        """Return the stream of a task, which is created if it does not exist.

        Raises:
            ConfigError: The buffer holds groups of another run.
        """
        if not of_any_run:
            self.enter()
        with self._lock:
            stream = self._streams.get(task)
            if stream is None:
                stream = self._streams[task] = self._make(task)
            if time.monotonic() - self._entered >= ENTER_AGAIN_S:
                self._enter(*self._streams)
            return stream

    def find(self, task: str) -> ExperienceStream | None:
        """Return the stream of a task; None if the task does not exist."""
        stream = self._streams.get(task)
        if (
            stream is None
            and self._names_client.execute("SISMEMBER", self._names, task)
            and self.exists(task)
        ):
            return self.open(task)
        return stream

    def names(self) -> list[str]:
        """Return the names of all tasks of the namespace, of all processes.

        A task that was deleted, as by `redrb rm`, is left out, although its name stays.
        """
        members = self._names_client.execute("SMEMBERS", self._names)
        found = set(filter(is_name, (name.decode(errors="replace") for name in members)))
        with self._lock:
            own = set(self._streams)
        if own - found:
            self._enter(*sorted(own - found))
        return sorted(own | {name for name in found - own if self.exists(name)})

    def total(self) -> int:
        """Return the number of waiting groups over all tasks and statuses."""
        return sum(len(self.open(task)) for task in self.names())

    def count(self, task: str, status: Status, where: Mapping[str, Any] | None = None) -> int:
        """Return the number of groups of a status that wait in a task and match a query."""
        stream = self.find(task)
        return 0 if stream is None else stream.count(status, where=where)

    def stored(self, *, leaving_out: Container[str]) -> int:
        """Return the number of stored groups of all other tasks, including leased ones."""
        return sum(
            self.open(task, of_any_run=True).stats().stored
            for task in self.names()
            if task not in leaving_out
        )

    def note_refresh(self, task: str, statuses: Iterable[Status], refresh: Expiry) -> None:
        """Note that all groups stored now have aged; for expired ones by which rule, too."""
        train_step, rule = refresh.current_version + 1, str(refresh).partition(" ")[2]
        names = [f"{status} {rule}" if status is Status.EXPIRED else status for status in statuses]
        store = self.store(task)
        stored = store.client.execute("HGET", store.keys.puts, "last")
        with Reading(f"the last id of task {task!r}"):
            last = int(stored or 0)
        pairs = [word for name in names for word in (name, f"{train_step} {last}")]
        if pairs:
            store.client.execute("HSET", store.keys.refreshed, *pairs)

    def refreshed(self, task: str, status: Status, ids: Iterable[int]) -> dict[int, list[Expiry]]:
        """Return the last refresh of each rule, oldest first, of groups that it has aged."""
        store, seqs, found = self.store(task), list(ids), dict[int, list[Expiry]]()
        marks = store.client.execute("HGETALL", store.keys.refreshed) if seqs else ()
        with Reading(f"the refreshes of task {task!r}"):
            for name, mark in zip(marks[::2], marks[1::2], strict=True):
                of, *rule = name.decode().split()
                train_step, last = map(int, mark.split())  # the newest group at that time
                if of == status:
                    refresh = Expiry.parse(" ".join((str(train_step - 1), *(rule or "--"))))
                    for seq in seqs:
                        if seq <= last:
                            found.setdefault(seq, []).append(refresh)
        for refreshes in found.values():
            refreshes.sort(key=lambda refresh: refresh.current_version)
        return found

    def store(self, task: str) -> TaskStore:
        """Return the store of a task, which may not exist."""
        store = self._stores.get(task)
        if store is None:
            store = self._stores[task] = TaskStore.of(self.client, self.namespace, task)
        return store

    def exists(self, task: str) -> bool:
        """Return whether the task is there; its name may stay without it."""
        store = self.store(task)
        return bool(store.client.execute("EXISTS", store.keys.task))

    def removed(self, task: str) -> bool:
        """Return whether a task that is gone was removed on purpose, as by `redrb rm`, lately."""
        store = self.store(task)
        return bool(store.client.execute("EXISTS", store.keys.removed))

    def close(self) -> None:
        """Close the streams; their leased groups are requeued."""
        with self._lock:
            streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.close()

    def _held(self) -> int:
        counts = [self.store(name).call(Stats(GROUP)) for name in self.names()]
        return sum(each["stored"] for each in counts if each is not None)

    def _enter(self, *tasks: str) -> None:
        self._names_client.execute("SADD", self._names, *tasks)
        if self.run is not None:
            self.run.own_again()
        self._entered = time.monotonic()

    def _make(self, task: str) -> ExperienceStream:
        stream = _Stream(
            partial(self._enter, task),
            self.client,
            task,
            namespace=self.namespace,
            group=GROUP,
            order=self.stream_order,
            # a wait for room would occupy one of the few threads, unless puts have their own
            on_full="error" if self.limit is None else "block",
            limit=self.limit,
            tags=self._tags,
            reader=as_stored,
            lease_ms=self._lease_ms,
            max_staleness=NO_BOUND,
            max_token_staleness=NO_BOUND,
            checks=(),  # rollouts of one task may differ, and are not put into batches
        )
        stream.join_group()
        return stream
