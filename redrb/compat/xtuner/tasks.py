"""The tasks of one buffer: a stream for each, and a set in Redis with the names of all tasks.

Redis may lose the set, with the tasks or, on a cluster, without them. So a process enters a name
again when its stream creates the task anew, when it looks for the names of all, and now and then.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import ge
from typing import Any, Literal, TypeAlias

from redrb.checks import check_choice, checked_int, checked_int_or_none
from redrb.compat.xtuner.runs import Run
from redrb.connection import Client, check_client
from redrb.errors import ConfigError
from redrb.experience import BufferItem, Status
from redrb.keys import check_name, is_name, replay_key
from redrb.scopes import closed_on_error
from redrb.stream import ExperienceStream
from redrb.stream.options import LEASE_MS, LEAST_LEASE_MS
from redrb.stream.take.part import Expiry
from redrb.stream.take.rollout_reading import as_stored
from redrb.stream.task.calls import Stats
from redrb.stream.task.description import StalenessRules
from redrb.stream.task.settings import NO_BOUND, OnExpired
from redrb.stream.task.store import TaskStore
from redrb.stream.task.tags import declare_tags
from redrb.unpacking import Reading

ReplayOrder: TypeAlias = Literal["fifo", "stalest"]

OnDiscard: TypeAlias = Callable[[list[list[Any]]], Awaitable[object] | object]

Ends: TypeAlias = OnExpired | Callable[[list[BufferItem]], object]

GROUP = "replay"
"""Consumer group of all buffers."""

ENTER_AGAIN_S = 10.0
"""Time after which a call enters the names of the streams again."""

STREAM_ORDERS = {"fifo": "fifo", "stalest": "priority"}


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferSettings:
    """The settings of a buffer, checked; `ReplayBuffer` describes them."""

    order: ReplayOrder = "fifo"
    namespace: str = "default"
    rollout_type: type | None = None
    lease_ms: int = LEASE_MS
    tags: Sequence[str] | None = None
    limit: int | None = None
    run: str | None = None
    on_discard: OnDiscard | None = None

    def __post_init__(self) -> None:
        check_choice("order", self.order, list(STREAM_ORDERS))
        check_name("namespace", self.namespace)
        checked_int("lease_ms", self.lease_ms, LEAST_LEASE_MS)
        checked_int_or_none("limit", self.limit, 1)
        if self.tags is not None:
            object.__setattr__(self, "tags", declare_tags(self.tags))
        if self.run not in (None, ""):
            check_name("run", self.run)
        if self.rollout_type is not None and not isinstance(self.rollout_type, type):
            raise ConfigError(f"rollout_type={self.rollout_type!r:.80} is not a class.")
        if self.on_discard is not None and not callable(self.on_discard):
            raise ConfigError(f"on_discard={self.on_discard!r:.80} is no function.")


class _Stream(ExperienceStream):
    """The stream of one task, which enters its name now and whenever it creates the task anew."""

    def __init__(self, enter_name: Callable[[], None], *arguments: Any, **options: Any) -> None:
        self._enter_name = enter_name
        super().__init__(*arguments, **options)

    def expire_by(self, rule: Expiry, statuses: Sequence[Status], ends: Ends) -> int:
        """Do what `expire` does, and note the rule's number with groups that are kept."""
        rules = StalenessRules(rule.max_staleness, rule.max_token_staleness)
        asked = (rule.current_version, rules, statuses, ends, rule.number)
        return self._expiration.expire(*asked)


class Tasks:
    """Streams of one namespace, opened at their first use and kept; thread-safe.

    Attributes:
        run: The run that the groups are of; None: nobody asks.
    """

    def __init__(self, client: Client, settings: BufferSettings) -> None:
        check_client(client)
        self.client, self.settings = client, settings
        self.namespace, self.order = settings.namespace, settings.order
        self.stream_order = STREAM_ORDERS[self.order]
        self._lock = threading.Lock()
        self._entered = time.monotonic()
        self._streams: dict[str, _Stream] = {}
        self._stores: dict[str, TaskStore] = {}
        name = settings.run
        self.run = None if name is None else Run(client, self.namespace, name, held=self._held)
        self._names = replay_key(self.namespace)
        self._names_client = client.at(self._names)

    def enter(self) -> bool:
        """Do what `Run.enter` does; False without a run."""
        return self.run is not None and self.run.enter()

    def open(self, task: str, *, of_any_run: bool = False) -> _Stream:
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

    def find(self, task: str) -> _Stream | None:
        """Return the stream of a task; None if the task does not exist.

        Raises:
            ConfigError: The buffer holds groups of another run.
        """
        known = self._streams.get(task) is not None or (
            self._names_client.execute("SISMEMBER", self._names, task) and self.exists(task)
        )
        if known:
            return self.open(task)
        self.enter()
        return None

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

    def refresh(self, stream: _Stream, rule: Expiry, ageing: Sequence[Status], ends: Ends) -> int:
        """Expire groups, and note that all groups stored before have aged; returns how many."""
        store = self.store(stream.task)
        marks, last = self._marks(store), _newest(store)
        number = max((mark.number for _, _, mark, _ in marks), default=0)
        rule = replace(rule, number=number + (Status.EXPIRED in ageing))
        fresh = [status for status in ageing if status is not Status.EXPIRED]
        expired = stream.expire_by(rule, fresh, ends)
        oldest = "-" if rule.max_staleness is None else rule.max_staleness
        names: list[str] = [*fresh]
        if fresh != ageing:
            names.append(f"expired {oldest} {rule.max_token_staleness} {rule.number}")
        if names:
            mark = f"{rule.current_version + 1} {last}"
            pairs = [word for name in names for word in (name, mark)]
            store.client.execute("HSET", store.keys.refreshed, *pairs)
        outdone = [name for name, _, older, _ in marks if _outdoes(rule, older)]
        if fresh != ageing and outdone:
            store.client.execute("HDEL", store.keys.refreshed, *outdone)
        return expired

    def refreshed(self, task: str, status: Status, ids: Iterable[int]) -> dict[int, list[Expiry]]:
        """Return the refreshes since which no stricter one came, oldest first, of their groups."""
        refreshes, seqs = dict[int, list[Expiry]](), list(ids)
        marks = self._marks(self.store(task)) if seqs else []
        for _, of, mark, last in sorted(marks, key=lambda each: each[2].number):
            for seq in seqs if of == status else ():
                if seq <= last:
                    refreshes.setdefault(seq, []).append(mark)
        return refreshes

    def _marks(self, store: TaskStore) -> list[tuple[str, str, Expiry, int]]:
        marks, found = store.client.execute("HGETALL", store.keys.refreshed), []
        with Reading(f"the refreshes of task {store.task!r}"):
            for name, mark in zip(marks[::2], marks[1::2], strict=True):
                status, *rule = name.decode().split()
                train_step, last = map(int, mark.split())
                text = " ".join((str(train_step - 1), *(rule or "--")))
                found.append((name.decode(), status, Expiry.parse(text), last))
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
        self._entered = time.monotonic()

    def _make(self, task: str) -> _Stream:
        settings = self.settings
        stream = _Stream(
            partial(self._enter, task),
            self.client,
            task,
            namespace=self.namespace,
            group=GROUP,
            order=self.stream_order,
            # a wait for room would occupy one of the few threads, unless puts have their own
            on_full="error" if settings.limit is None else "block",
            limit=settings.limit,
            tags=settings.tags,
            reader=as_stored,
            lease_ms=settings.lease_ms,
            max_staleness=NO_BOUND,
            max_token_staleness=NO_BOUND,
            checks=(),  # rollouts of one task may differ, and are not put into batches
        )
        with closed_on_error(stream):
            stream.join_group()
        return stream


def _newest(store: TaskStore) -> int:
    last = store.client.execute("HGET", store.keys.puts, "last")
    with Reading(f"the last id of task {store.task!r}"):
        return int(last or 0)


def _outdoes(newer: Expiry, older: Expiry) -> bool:
    """Return whether a refresh of expired groups resets all rollouts that an older one resets."""

    def cuts(rule: Expiry) -> list[float]:
        rules = (rule.max_staleness, rule.max_token_staleness)
        return [-math.inf if each is None else rule.current_version - each for each in rules]

    return older.number > 0 and all(map(ge, cuts(newer), cuts(older)))
