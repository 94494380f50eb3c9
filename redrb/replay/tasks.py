"""The tasks of one buffer: a stream for each, and a set in Redis with the names of all tasks."""

from __future__ import annotations

import threading
from collections.abc import Container, Iterable
from typing import Literal, NamedTuple, TypeAlias

from redrb.checks import check_choice
from redrb.connection import Client, check_client
from redrb.experience import Status
from redrb.keys import TaskKeys, check_name
from redrb.stream import ExperienceStream
from redrb.stream.task.store import TaskStore

ReplayOrder: TypeAlias = Literal["fifo", "stalest"]

GROUP = "replay"
"""Consumer group of all buffers."""

NEVER = 2**31
"""A staleness that no group reaches: the task indexes versions for `expire`, but expires none."""

_STREAM_ORDERS = {"fifo": "fifo", "stalest": "priority"}


class Refreshed(NamedTuple):
    """A refresh of staleness: its train step, and the newest group at that time."""

    train_step: int
    last: int


class Tasks:
    """Streams of one namespace, opened at their first use and kept; thread-safe."""

    def __init__(self, client: Client, namespace: str, order: ReplayOrder, lease_ms: int) -> None:
        check_client(client)
        check_choice("order", order, list(_STREAM_ORDERS))
        self.client = client
        self.namespace = check_name("namespace", namespace)
        self.order = order
        self._lease_ms = lease_ms
        self._lock = threading.Lock()
        self._streams: dict[str, ExperienceStream] = {}
        prefix = TaskKeys.of(namespace, GROUP).prefix
        self._names = f"{prefix}tasks"
        self._names_client = client.at(prefix)

    def open(self, task: str) -> ExperienceStream:
        """Return the stream of a task, which is created if it does not exist.

        Raises:
            TaskMismatch: The task has another order, or was not made by a `ReplayBuffer`.
        """
        with self._lock:
            stream = self._streams.get(task)
            if stream is None:
                stream = self._make(task)
                self._names_client.execute("SADD", self._names, task)
                self._streams[task] = stream
            return stream

    def find(self, task: str) -> ExperienceStream | None:
        """Return the stream of a task; None if the task does not exist."""
        stream = self._streams.get(task)
        if stream is None and self._names_client.execute("SISMEMBER", self._names, task):
            return self.open(task)
        return stream

    def names(self) -> list[str]:
        """Return the names of all tasks of the namespace, of all processes."""
        return sorted(name.decode() for name in self._names_client.execute("SMEMBERS", self._names))

    def total(self) -> int:
        """Return the number of waiting groups over all tasks and statuses."""
        return sum(len(self.open(task)) for task in self.names())

    def stored(self, *, leaving_out: Container[str]) -> int:
        """Return the number of stored groups of all other tasks, including leased ones."""
        return sum(
            self.open(task).stats().stored for task in self.names() if task not in leaving_out
        )

    def note_refresh(self, task: str, statuses: Iterable[Status], train_step: int) -> None:
        """Note that all groups stored now have their staleness at `train_step`."""
        store = self.store(task)
        last = int(store.client.execute("HGET", store.keys.puts, "last") or 0)
        pairs = [word for status in statuses for word in (str(status), f"{train_step} {last}")]
        if pairs:
            store.client.execute("HSET", store.keys.refreshed, *pairs)

    def refreshed(self, task: str, status: Status) -> Refreshed | None:
        """Return the last refresh of a status; None if there was none."""
        store = self.store(task)
        stored = store.client.execute("HGET", store.keys.refreshed, str(status))
        return None if stored is None else Refreshed(*map(int, stored.split()))

    def refreshes(self, task: str) -> dict[str, str]:
        """Return the last refresh of each status: "<train step> <newest id>"."""
        store = self.store(task)
        flat = iter(store.client.execute("HGETALL", store.keys.refreshed))
        return {status.decode(): mark.decode() for status, mark in zip(flat, flat, strict=True)}

    def store(self, task: str) -> TaskStore:
        """Return the store of a task, which may not exist."""
        return TaskStore.of(self.client, self.namespace, task)

    def now_us(self) -> int:
        """Return the time of the server that holds the names of the tasks, in us since 1970."""
        seconds, microseconds = map(int, self._names_client.execute("TIME"))
        return seconds * 1_000_000 + microseconds

    def forget(self, task: str) -> None:
        """Close the stream of a task that was replaced; the next `open` opens it again."""
        with self._lock:
            stream = self._streams.pop(task, None)
        if stream is not None:
            stream.close()

    def close(self) -> None:
        """Close the streams; their leased groups are requeued."""
        with self._lock:
            streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.close()

    def _make(self, task: str) -> ExperienceStream:
        stream = ExperienceStream(
            self.client,
            task,
            namespace=self.namespace,
            group=GROUP,
            order=_STREAM_ORDERS[self.order],
            on_full="error",  # a wait for room would occupy one of the few threads
            lease_ms=self._lease_ms,
            max_staleness=NEVER,
            max_token_staleness=NEVER,
            checks=(),  # rollouts of one task may differ, and are not put into batches
        )
        stream.join_group()
        return stream
