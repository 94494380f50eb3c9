"""The side of makers: groups go in exactly once, and wait for room when there is none."""

from __future__ import annotations

import itertools
import logging
import math
import os
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from redrb.connection.request import Request
from redrb.errors import ConfigError, StoreError, StoreFull
from redrb.stream.put.batch import PutBatch
from redrb.stream.put.reindexing import reindexed
from redrb.stream.put.scripts import PutReply, PutScripts
from redrb.stream.task.scripts import TaskScripts
from redrb.stream.task.store import TaskStore
from redrb.stream.waiting import QUEUE_TTL_MS, WARN_EVERY_S, Wait

_log = logging.getLogger("redrb")

OnFull: TypeAlias = Literal["block", "drop_oldest", "error"]

CHUNK_GROUPS = 32
"""Most groups a transaction; more of them bring nothing."""

CHUNK_BYTES = 4 << 20
"""Most bytes a transaction, unless a single group is larger."""

STALE_ROW = 8
"""Groups in a row that are too stale on arrival before a producer warns."""

EVICTIONS = 8
"""Attempts to make room by evicting before a put gives up."""

EVICTED = 1000
"""As many groups `redrb/lua/put/evict.lua` evicts at least, where so many are too many."""


@dataclass(slots=True)
class _Identity:
    """A producer as Redis knows it; used by one thread at a time, so its puts are in order.

    Attributes:
        name: Its name.
        operation: Number of its last put.
        interrupted: Whether an attempt of it broke: it may still reach the server, and must find
            there that its put is done.
    """

    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    operation: int = 0
    interrupted: bool = False


@dataclass(slots=True)
class PendingPut:
    """Groups on their way into a task, and how far they are.

    Attributes:
        identity: Who puts them.
        batch: All of them.
        ids: Ids of those that are surely in, from the first.
        numbered: Whether the identity's last operation is an attempt of the next chunk.
        begun: A request for the next chunk that was sent already.
    """

    identity: _Identity
    batch: PutBatch
    ids: list[int] = field(default_factory=list)
    numbered: bool = False
    begun: Request[PutReply] | None = None

    def settle_begun(self) -> bool:
        """Hold what was sent before as it was sent: by now its tensors may have been changed."""
        begun, self.begun = self.begun, None
        if begun is not None:
            self.batch = self.batch.with_payloads(begun.pipeline.payloads())
        return begun is not None

    def chunk(self) -> PutBatch:
        """Return the groups that go into the next transaction: at least one, if there are any."""
        groups = self.batch.groups
        start = end = len(self.ids)
        size = 0
        while end < len(groups) and end - start < CHUNK_GROUPS:
            size += groups[end].nbytes
            if end > start and size > CHUNK_BYTES:
                break
            end += 1
        return self.batch.part(start, end)


class _Arrivals:
    """Warns when everything that arrives is too stale already: then nothing is ever trained."""

    def __init__(self, task: str) -> None:
        self._task = task
        self._row = 0
        self._warned_at = -math.inf

    def note(self, groups: int, expired: int) -> None:
        self._row = self._row + groups if expired and expired == groups else 0
        now = time.monotonic()
        if self._row >= STALE_ROW and now - self._warned_at >= WARN_EVERY_S:
            self._warned_at = now
            _log.warning(
                "task %r: the last %d groups were too stale when they arrived, none is left to "
                "train on: raise max_staleness, publish weights less often, or make groups faster",
                self._task,
                self._row,
            )


class Producer:
    """Puts encoded groups into one task; safe among threads."""

    def __init__(self, store: TaskStore, on_full: OnFull, reopen: Callable[[], None]) -> None:
        """Make a producer.

        Args:
            store: The task.
            on_full: What a put does when there is no room.
            reopen: Creates the task again after somebody cleared it.
        """
        self._store = store
        self._scripts = PutScripts(store)
        self._task_scripts = TaskScripts(store)
        self._on_full = on_full
        self._reopen = reopen
        self._pid = os.getpid()
        self._idle: deque[_Identity] = deque()
        self._crowded = False
        self._arrivals = _Arrivals(store.task)

    def put(self, batch: PutBatch, timeout: float | None) -> tuple[int, ...]:
        """Store groups, a chunk of them a transaction; returns their ids in order.

        Raises:
            StoreFull: No room in time.
            StoreUnavailable: Redis stayed away.
            ConfigError: A group is larger than the task's limits.
            All of them: `stored` says how many groups, from the first, are surely in.
        """
        putting = PendingPut(self._identity(), batch)
        try:
            return self.settle(putting, timeout)
        finally:
            self.abandon(putting)

    def begin(self, batch: PutBatch) -> PendingPut | None:
        """Send groups and do not wait for the reply; `settle` does.

        None when nothing was sent, since they are too many for one transaction, or room is scarce.
        """
        putting = PendingPut(self._identity(), batch)
        chunk = putting.chunk()
        if self._crowded or len(chunk) < len(batch):
            self.abandon(putting)
            return None
        self._number(putting)
        identity = putting.identity
        putting.begun = self._scripts.put(identity.name, identity.operation, chunk)
        putting.begun.begin()
        return putting

    def hold(self, batch: PutBatch) -> PendingPut:
        """Return groups that `settle` is to put; nothing is sent yet."""
        return PendingPut(self._identity(), batch)

    def settle(self, putting: PendingPut, timeout: float | None) -> tuple[int, ...]:
        """Wait until all groups are in; raises as `put` does, and may be called again then."""
        wait = Wait(timeout)
        ids, total, over = putting.ids, len(putting.batch), False
        try:
            while not over:
                reply = self._put_chunk(putting, wait)
                ids += range(reply.last - reply.stored + 1, reply.last + 1)
                putting.numbered = False
                over = len(ids) == total
        except BaseException as error:
            putting.identity.interrupted = True
            if isinstance(error, (StoreError, ConfigError)):
                error.stored = len(ids)
                if ids:
                    error.add_note(f"{len(ids)} of {total} groups were stored before this.")
            raise
        return tuple(ids)

    def abandon(self, putting: PendingPut) -> None:
        """Let others use the identity; what is not in by now may come in late, once, or never."""
        if putting.begun is not None:
            putting.begun.drop()
            putting.identity.interrupted = True
        if self._pid == os.getpid():
            self._idle.append(putting.identity)

    def close(self) -> None:
        """Let Redis forget this producer; what it has put stays.

        Identities that had an attempt interrupted are remembered: it may arrive yet.
        """
        if self._pid != os.getpid():
            return
        idle, self._idle = self._idle, deque()
        over = [identity.name for identity in idle if not identity.interrupted]
        if over:
            self._scripts.forget(over)

    def _identity(self) -> _Identity:
        """Return an identity that nobody uses; a forked process has none of its parent's."""
        if self._pid != os.getpid():
            self._pid, self._idle = os.getpid(), deque()
        try:
            return self._idle.pop()
        except IndexError:
            return _Identity()

    def _number(self, putting: PendingPut) -> None:
        """Give the next chunk its operation number, unless it has one."""
        if not putting.numbered:
            putting.identity.operation += 1
            putting.numbered = True

    def _put_chunk(self, putting: PendingPut, wait: Wait) -> PutReply:
        """Store all groups of a chunk, or as many from its start as there is room for."""
        self._number(putting)
        identity, chunk, stored = putting.identity, putting.chunk(), len(putting.ids)
        count, evict = len(chunk), None
        for attempt in itertools.count(1):
            begun = putting.begun
            queued = self._crowded and self._on_full == "block" and begun is None
            if queued:
                count = self._wait_for_room(identity, chunk, wait, stored)
            request = begun or self._scripts.put(
                identity.name, identity.operation, chunk.part(0, count), evict=evict
            )
            try:
                reply = self._result(identity, request, wait)
            except BaseException:
                putting.settle_begun()
                raise
            if reply.outcome in ("ok", "again"):
                self._arrivals.note(reply.stored, reply.expired)
                self._crowded = 0 <= reply.room < len(chunk)
                putting.begun = None
                return reply
            if putting.settle_begun():
                chunk = putting.batch
            if reply.outcome in ("gone", "indexed"):
                chunk = self._prepare_anew(putting)
            elif reply.outcome == "plain":
                self._task_scripts.convert()
            elif reply.outcome == "never":
                count = self._smaller(chunk, count)
            elif self._on_full == "block":
                if queued:  # another producer was faster, or the server has no memory
                    self._pause(identity, reply, wait, stored)
                self._crowded = True
            elif (
                self._on_full == "drop_oldest" and reply.setting != "rate" and attempt <= EVICTIONS
            ):
                evict = self._make_room(identity, chunk.part(0, count), reply, attempt, evict)
            else:
                raise self._full(reply, stored)
        raise AssertionError("counting never ends")

    def _prepare_anew(self, putting: PendingPut) -> PutBatch:
        """Learn what the task is by now, and return the chunk as it asks for it."""
        self._reopen()
        names, by_token = self._store.names, self._store.by_token
        putting.batch = reindexed(putting.batch, names, by_token=by_token)
        return putting.chunk()

    def _result(self, identity: _Identity, request: Request[PutReply], wait: Wait) -> PutReply:
        try:
            return request.result(retry_s=wait.retry_s)
        except StoreFull:  # the server's memory: waits and evictions help as at a limit of our own
            return PutReply("memory")
        finally:
            identity.interrupted |= request.attempts > 1

    def _make_room(
        self,
        identity: _Identity,
        batch: PutBatch,
        reply: PutReply,
        attempt: int,
        evicted: int | None,
    ) -> int | None:
        """Evict, or return how many groups the next attempt is to evict at least."""
        if reply.outcome == "memory":  # freed by whole nodes of entries: ask for ever more
            least = len(batch) << attempt
            self._scripts.evict(identity.name, identity.operation, batch, least=least)
            return None
        if evicted is None:
            return 0
        gone = found = EVICTED
        while found >= EVICTED:  # a limit that was given later is reached by and by
            found = self._scripts.evict(identity.name, identity.operation, batch, least=0)
            gone += found
        return 0 if gone > EVICTED else evicted + len(batch)

    def _wait_for_room(self, identity: _Identity, chunk: PutBatch, wait: Wait, stored: int) -> int:
        """Queue until there is room for some groups; returns for how many."""
        sizes = [group.nbytes for group in chunk.groups]
        while True:
            room, setting = self._scripts.room(identity.name, sizes, ttl_ms=QUEUE_TTL_MS)
            if room > 0:
                return room
            self._pause(identity, PutReply("full", setting=setting), wait, stored)

    def _pause(self, identity: _Identity, reply: PutReply, wait: Wait, stored: int) -> None:
        """Wait in the queue until something was acknowledged, for a slice of time at most."""
        if wait.over:
            self._scripts.room(identity.name, [], ttl_ms=0)
            raise self._full(reply, stored)
        wait.tell(f"task {self._store.task!r} has no room: a put waits")
        self._store.wait_for_wake(wait.slice_s(), identity.name)

    def _smaller(self, chunk: PutBatch, count: int) -> int:
        """Return how many groups to try when `count` of them exceed the limits at once."""
        if count == 1:
            raise ConfigError(
                f"task {self._store.task!r}: a group of {chunk.groups[0].nbytes} bytes is larger "
                "than max_bytes: raise it, or make groups smaller."
            )
        return max(1, count // 2)

    def _full(self, reply: PutReply, stored: int) -> StoreFull:
        task = self._store.task
        if reply.outcome == "memory":
            return StoreFull(
                f"Redis at {self._store.client.where} is at its memory limit and task {task!r} "
                "cannot grow: raise maxmemory, or let trainers catch up.",
                task=task,
                stored=stored,
                reason="memory",
            )
        if reply.setting == "rate":
            return StoreFull(
                f"task {task!r}: its rate holds puts back until trainers have read more.",
                task=task,
                stored=stored,
                reason="rate",
            )
        return StoreFull(
            f"task {task!r} is full and nothing made room: trainers must acknowledge what they "
            "took (`redrb stats`), or raise limit / max_bytes.",
            task=task,
            stored=stored,
            reason=reply.setting,
        )
