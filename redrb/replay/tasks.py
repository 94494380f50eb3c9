"""The tasks of one buffer: a stream each, and a set in Redis that names those of all processes."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple, TypeAlias

from redrb.connection import Client
from redrb.errors import ConfigError
from redrb.experience import Status
from redrb.keys import TaskKeys, check_name
from redrb.stream import ExperienceStream

ReplayOrder: TypeAlias = Literal["fifo", "stalest"]

GROUP = "replay"
"""Consumer group of all buffers."""

NEVER = 2**31
"""A staleness that nothing reaches: the task keeps what `expire` needs, and expires nothing."""

_STREAM_ORDERS = {"fifo": "fifo", "stalest": "priority"}


class Refreshed(NamedTuple):
    """A refresh: the trainer's step, and the newest group that was stored by then."""

    train_step: int
    last: int


class Tasks:
    """Streams of one namespace, opened at their first use and kept; safe among threads."""

    def __init__(self, client: Client, namespace: str, order: ReplayOrder, lease_ms: int) -> None:
        if not isinstance(client, Client):
            raise ConfigError(
                f"the client is a {type(client).__name__}: pass what redrb.connect(url) returns."
            )
        if order not in _STREAM_ORDERS:
            raise ConfigError(f'order={order!r}: use "fifo" or "stalest".')
        self.client = client
        self.namespace = check_name("namespace", namespace)
        self.order = order
        self._lease_ms = lease_ms
        self._lock = threading.Lock()
        self._streams: dict[str, ExperienceStream] = {}
        prefix = TaskKeys.of(namespace, GROUP).prefix
        self._names = f"{prefix}tasks"
        self._refreshed = f"{prefix}refreshed"
        self._own = client.at(prefix)

    def open(self, task: str) -> ExperienceStream:
        """Return the stream of a task, which is created when it is new.

        Raises:
            TaskMismatch: It exists with another order, or was not made by a buffer.
        """
        with self._lock:
            stream = self._streams.get(task)
            if stream is None:
                stream = self._make(task)
                self._own.execute("SADD", self._names, task)
                self._streams[task] = stream
            return stream

    def find(self, task: str) -> ExperienceStream | None:
        """Return the stream of a task; None where no process has made it yet."""
        stream = self._streams.get(task)
        if stream is None and self._own.execute("SISMEMBER", self._names, task):
            return self.open(task)
        return stream

    def names(self) -> list[str]:
        """Return the names of all tasks of the namespace, of whichever process."""
        return sorted(name.decode() for name in self._own.execute("SMEMBERS", self._names))

    def total(self) -> int:
        """Return how many groups wait, over all tasks and statuses."""
        return sum(len(self.open(task)) for task in self.names())

    def stored(self) -> int:
        """Return how many groups are stored, those included that somebody has just got."""
        return sum(self.open(task).stats().stored for task in self.names())

    def note_refresh(self, task: str, statuses: Iterable[Status], train_step: int) -> None:
        """Note that what is stored by now has its staleness as of `train_step`."""
        keys = TaskKeys.of(self.namespace, task)
        last = int(self.client.at(keys.prefix).execute("HGET", f"{keys.prefix}task", "last") or 0)
        told = [
            word for status in statuses for word in (f"{task} {status}", f"{train_step} {last}")
        ]
        if told:
            self._own.execute("HSET", self._refreshed, *told)

    def refreshed(self, task: str, status: Status) -> Refreshed | None:
        """Return what the last refresh of a status was; None: there was none."""
        told = self._own.execute("HGET", self._refreshed, f"{task} {status}")
        if told is None:
            return None
        return Refreshed(*map(int, told.split()))

    def refreshes(self) -> dict[str, str]:
        """Return all refreshes, as `note_refreshes` takes them."""
        told = iter(self._own.execute("HGETALL", self._refreshed))
        return {name.decode(): mark.decode() for name, mark in zip(told, told, strict=True)}

    def note_refreshes(self, refreshes: Mapping[str, str]) -> None:
        """Forget all refreshes, and note these."""
        self._own.execute("DEL", self._refreshed)
        for name, mark in refreshes.items():
            self._own.execute("HSET", self._refreshed, name, mark)

    def clear(self, task: str) -> None:
        """Delete a task; it is new when it is opened again."""
        stream = self.open(task)
        with self._lock:
            stream.clear()
            stream.close()
            self._streams.pop(task, None)

    def close(self) -> None:
        """Close the streams; what they lease goes back."""
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
            on_full="error",  # who waits for room would hold a thread that others need
            lease_ms=self._lease_ms,
            max_staleness=NEVER,
            max_token_staleness=NEVER,
        )
        stream.join_group()
        return stream
