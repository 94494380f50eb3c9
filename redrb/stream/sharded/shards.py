"""`Shards`: the streams of a sharded task, opened when they can be reached."""

from __future__ import annotations

import itertools
import logging
import random
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from redrb.connection import Client
from redrb.connection.deadline import GRACE_S, Deadline
from redrb.errors import StoreUnavailable, TaskMismatch
from redrb.stream.put.batch import PutBatch
from redrb.stream.put.fitting import reindexed
from redrb.stream.put.options import PutOptions
from redrb.stream.put.pending import PendingPut
from redrb.stream.put.preparer import Groups
from redrb.stream.put.producer import Producer
from redrb.stream.stream import ExperienceStream
from redrb.stream.take.calls import TakeRequest
from redrb.stream.take.taker import Taker
from redrb.stream.task.store import TaskStore
from redrb.unpacking import Reading

AWAY_S = 5.0
"""Time for which a node that could not be reached is left out, where others can be reached."""

T = TypeVar("T")

_log = logging.getLogger("redrb")


class Shard(ExperienceStream):
    """One shard: a stream whose puts and takes are tried, and waited for beside others."""

    @property
    def taker(self) -> Taker:
        """What takes from it."""
        return self._taker

    @property
    def producer(self) -> Producer:
        """What puts into it."""
        return self._producer

    def request(self, *asked: Any) -> TakeRequest:
        """Check count, least count, status and query of a take."""
        return self._take_request(*asked)

    def prepared(self, groups: Groups, options: PutOptions) -> PutBatch:
        """Encode and check groups; raises as `put`."""
        batch = self._prepare(groups, options)
        batch.raise_refused()
        return batch

    def new_put(self, batch: PutBatch) -> PendingPut:
        """Return a put, of which nothing is sent yet, of groups that any shard has prepared."""
        description = self._task.description
        alike = batch.revision == description.revision
        return self._producer.new(batch if alike else reindexed(batch, description))

    def wake(self, waiter: str) -> tuple[Client, str]:
        """Return where a waiter is woken: the client, and the name of a list."""
        return self._store.client, self._store.keys.wake(waiter)


class Shards:
    """The shards of a task; safe among threads.

    It learns from requests which nodes cannot be reached. Their shards are left out for `AWAY_S`
    and then asked again, so that an outage costs one request in this time and not each of them.
    """

    def __init__(
        self, client: Client, task: str, count: int, namespace: str, options: Mapping[str, Any]
    ) -> None:
        self.names = [f"{task}@{number}" for number in range(count)]
        self._task, self._client = task, client
        self._options = {"namespace": namespace, **options}
        self._stores = [TaskStore.of(client, namespace, name) for name in self.names]
        self._open: dict[int, Shard] = {}
        self._lock = threading.Lock()
        self._away: dict[str, float] = {}  # node -> when it is asked again
        first, *_ = random.sample(range(count), 1)  # not the same one in all processes
        self._turns = itertools.count(first)
        self.ask(lambda _: None)

    def __len__(self) -> int:
        """Return the number of shards."""
        return len(self.names)

    def __getitem__(self, number: int) -> Shard:
        """Return a shard, which is opened now if it is not yet; raises as `ExperienceStream`."""
        shard = self._open.get(number)
        if shard is None:
            with self._lock:
                shard = self._open.get(number)
                if shard is None:
                    self._check_count(number)
                    shard = Shard(self._client, self.names[number], **self._options)
                    self._stores[number].client.execute("HSETNX", *self._count(number), len(self))
                    self._check_count(number)
                    self._open[number] = shard
        return shard

    @property
    def opened(self) -> list[Shard]:
        """The shards that are open."""
        return [self._open[number] for number in sorted(self._open)]

    @property
    def away(self) -> list[str]:
        """Names of the shards that are left out now."""
        now = time.monotonic()
        nodes = {node for node, until in tuple(self._away.items()) if now < until}
        pairs = zip(self.names, self._stores, strict=True) if nodes else ()
        return [name for name, store in pairs if store.client.node in nodes]

    @property
    def all_away(self) -> bool:
        """Whether no shard can be reached."""
        return len(self.away) == len(self)

    def in_turn(self) -> list[int]:
        """Return the shards that are not left out, or all if none is left, from another on."""
        first, away = next(self._turns), self.away
        turn = [(first + place) % len(self) for place in range(len(self))]
        return [number for number in turn if self.names[number] not in away] or turn

    def lose(self, number: int, error: StoreUnavailable) -> None:
        """Note that a shard could not be reached."""
        node = self._stores[number].client.node
        if node not in self._away:
            _log.warning("task %r: shards on %s are left out: %s", self._task, node, error)
        self._away[node] = time.monotonic() + AWAY_S

    def find(self, number: int) -> None:
        """Note that a shard was reached."""
        if self._away:
            self._away.pop(self._stores[number].client.node, None)

    def ask(self, look: Callable[[Shard], T]) -> dict[str, T]:
        """Call `look` with each shard that can be reached; returns the results by name.

        Raises:
            StoreUnavailable: None could be reached within the time of the client.
        """
        found: dict[str, T] = {}
        for number in self.in_turn():
            if self.names[number] not in self.away:
                try:
                    with Deadline(at_most=GRACE_S):
                        found[self.names[number]] = look(self[number])
                    self.find(number)
                except StoreUnavailable as error:
                    self.lose(number, error)
        return found or {self.names[number]: look(self[number]) for number in range(len(self))}

    def _count(self, number: int) -> tuple[str, str]:
        """Return where a shard keeps the number of shards that its task has."""
        return self._stores[number].keys.task, "shards"

    def _check_count(self, number: int) -> None:
        """Raise TaskMismatch if another process has opened the task with another number."""
        stored = self._stores[number].client.execute("HGET", *self._count(number))
        with Reading(f"the number of shards of task {self._task!r}"):
            count = int(stored or len(self))
        if count != len(self):
            error = TaskMismatch(self._task, {"shards": (count, len(self))})
            error.add_note("All processes give the same shards=; it cannot change.")
            raise error
