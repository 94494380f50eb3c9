"""`Shards`: the streams of a sharded task, opened when they can be reached."""

from __future__ import annotations

import itertools
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

from redrb.connection import Client
from redrb.connection.deadline import SHORT_OUTAGE_S, Deadline, here
from redrb.errors import StoreUnavailable, TaskMismatch
from redrb.scopes import closed_on_error
from redrb.stream.mixture.mixture import close_all
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
from redrb.stream.task.wakes import wait_for_any
from redrb.unpacking import Reading

AWAY_S = 5.0
"""Time for which a node that could not be reached is left out, where others can be reached."""

T = TypeVar("T")

_log = logging.getLogger("redrb")


class Shard(ExperienceStream):
    """One shard: a stream whose puts and takes are tried, and waited for beside others."""

    def __init__(
        self, *arguments: Any, check: Callable[[], None] | None = None, **options: Any
    ) -> None:
        """Open it, and call `check` whenever its task may have been created anew; it may raise."""
        self._enter_name = check
        super().__init__(*arguments, **options)

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

    def wait(self, waiter: str) -> None:
        """Wait until a waiter in its queue is woken, or should look again."""
        self._store.wait_for_wake(waiter)


class Shards:
    """The shards of a task; safe among threads.

    It learns from requests which nodes cannot be reached. Their shards are left out for `AWAY_S`
    and then asked again, so that an outage costs one request in this time and not each of them.
    """

    def __init__(self, client: Client, task: str, count: int, options: Mapping[str, Any]) -> None:
        self.names = [f"{task}@{number}" for number in range(count)]
        self._task, self._client = task, client
        self._options = options
        self._stores = [TaskStore.of(client, options["namespace"], name) for name in self.names]
        self._open: dict[int, Shard] = {}
        self._lock = threading.Lock()
        self._away: dict[str, float] = {}  # node -> when it is asked again
        self._why = ""
        self._turns = itertools.count(*random.sample(range(count), 1))  # each process another one
        with closed_on_error(self):
            self.ask(lambda _: None)

    def __len__(self) -> int:
        """Return the number of shards."""
        return len(self.names)

    def __getitem__(self, number: int) -> Shard:
        """Return a shard, which is opened now if it is not yet; raises as `ExperienceStream`."""
        if number not in self._open:
            with self._lock, Deadline(repeat_s=SHORT_OUTAGE_S):
                if number not in self._open:
                    self._check_count(number)
                    check, options = partial(self._note_count, number), self._options
                    shard = Shard(self._client, self.names[number], check=check, **options)
                    self._open[number] = shard
        return self._open[number]

    @property
    def opened(self) -> list[Shard]:
        """The shards that are open."""
        return [self._open[number] for number in sorted(self._open)]

    def close(self, *others: Shard) -> None:
        """Close the shards and others; raises StoreUnavailable as `ShardedStream.close`."""
        close_all(self._client, [*self.opened, *others])

    @property
    def away(self) -> list[str]:
        """Names of the shards that are left out now."""
        return [name for number, name in enumerate(self.names) if self._is_away(number)]

    @property
    def outage_s(self) -> float:
        """Outage of a node that a request survives: the shorter, the more nodes are away."""
        now = time.monotonic()
        return SHORT_OUTAGE_S / (1 + sum(now < again for again in self._away.values()))

    def tries(self) -> Iterator[int]:
        """Yield the shards that are not left out, each to be asked in `asking`, from another on.

        While none is reached, one on each node is tried again and again.

        Raises:
            StoreUnavailable: None was reached for the time of the call, or of the client.
        """
        gives_up, reached = time.monotonic() + self._client.retry_s, False
        while not reached:
            first = next(self._turns)
            turn = [(first + place) % len(self) for place in range(len(self))]
            all_away = all(map(self._is_away, turn))
            if all_away:
                turn = list({self._node(number): number for number in turn}.values())
            for number in turn:
                if all_away or not self._is_away(number):
                    yield number
                    reached |= not self._is_away(number)
            if not reached and (here().over or time.monotonic() >= gives_up):
                names = f"{self.names[0]!r} to {self.names[-1]!r}"
                message = f"none of the tasks {names} could be reached; of the last: {self._why}"
                raise StoreUnavailable(message, where=self._client.where)

    @contextmanager
    def asking(self, number: int, repeat_s: float | None = None) -> Iterator[None]:
        """Note whether the requests of the block, repeated for `outage_s`, reach a shard."""
        reached = True
        try:
            with Deadline(repeat_s=self.outage_s if repeat_s is None else repeat_s):
                yield
        except StoreUnavailable as error:
            reached, self._why, node = False, str(error), self._node(number)
            if node not in self._away:
                mine = [name for at, name in enumerate(self.names) if self._node(at) == node]
                why = error.__cause__ or error
                _log.warning("tasks %s are left out: %s: %s", ", ".join(mine), node, why)
            self._away[node] = time.monotonic() + AWAY_S
            raise
        finally:
            if reached:
                self._away.pop(self._node(number), None)

    def ask(self, look: Callable[[Shard], T]) -> dict[str, T]:
        """Call `look` with each shard that can be reached; returns the results by name.

        Raises:
            StoreUnavailable: None could be reached.
        """
        found: dict[str, T] = {}
        while not found:
            for number in self.tries():
                with suppress(StoreUnavailable), self.asking(number):
                    found[self.names[number]] = look(self[number])
        return found

    def wait(self, waiters: Mapping[int, str]) -> None:
        """Wait until a waiter, given by shard, is woken in one of those that are not left out."""
        lists = [
            (self._stores[number].client, self._stores[number].keys.wake(waiter))
            for number, waiter in waiters.items()
            if not self._is_away(number)
        ]
        if lists:
            wait_for_any(lists)

    def _node(self, number: int) -> str:
        return self._stores[number].client.node

    def _is_away(self, number: int) -> bool:
        return time.monotonic() < self._away.get(self._node(number), 0.0)

    def _note_count(self, number: int) -> None:
        """Write the number of shards into a shard that has none, and check it."""
        store = self._stores[number]
        store.client.execute("HSETNX", store.keys.task, "shards", len(self))
        self._check_count(number)

    def _check_count(self, number: int) -> None:
        """Raise TaskMismatch if another process has opened the task with another number."""
        store = self._stores[number]
        stored = store.client.execute("HGET", store.keys.task, "shards")
        with Reading(f"the number of shards of task {self._task!r}"):
            count = int(stored or len(self))
        if count != len(self):
            error = TaskMismatch(self._task, {"shards": (count, len(self))})
            error.add_note("All processes give the same shards=; it cannot change.")
            raise error
