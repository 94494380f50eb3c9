"""Room for a put at the limits of its task: waited for, made by eviction, or an error."""

from __future__ import annotations

from contextlib import suppress
from typing import Literal, TypeAlias

from redrb.connection.deadline import Deadline, here
from redrb.errors import ConfigError, StoreError, StoreFull
from redrb.stream.put.calls import AskRoom, Evict, PutReply
from redrb.stream.put.pending import Attempt
from redrb.stream.task.lookup import stats_of
from redrb.stream.task.store import QUEUE_TTL_MS, TaskStore
from redrb.words import agreeing, counted

OnFull: TypeAlias = Literal["block", "drop_oldest", "drop_stalest", "error"]

EVICTION_ATTEMPTS = 8
"""Attempts to make room by eviction before a put gives up."""

MOST_NAMED = 4
"""Consumer groups that an error names."""


class Room:
    """Finds room for the puts of one task.

    Attributes:
        scarce: Whether the task may have no room for the next chunk.
    """

    def __init__(self, store: TaskStore, on_full: OnFull) -> None:
        self.scarce = False
        self._store = store
        self._on_full = on_full
        self._evicts = on_full in ("drop_oldest", "drop_stalest")

    def reserve(self, attempt: Attempt) -> None:
        """Queue until there is room for some of the groups, or evict with the first attempt."""
        if self._on_full != "block":
            attempt.evict = 0 if self._evicts else None
            return
        sizes = [group.nbytes for group in attempt.pending.chunk().groups]
        name = attempt.pending.identity.name
        attempt.queued = True
        while True:
            room = self._store.call(AskRoom(name, QUEUE_TTL_MS, sizes))
            if room.granted > 0:
                attempt.most = room.granted
                return
            self._pause(attempt, PutReply("full", setting=room.setting))

    def make(self, attempt: Attempt, reply: PutReply) -> None:
        """Wait, evict or try fewer groups, after an attempt that found no room.

        Raises:
            StoreFull: There was no room in time, or none can be made.
            ConfigError: A group is larger than the limits.
        """
        attempt.refused += 1
        if reply.outcome == "never":
            self._try_fewer(attempt)
        elif self._on_full == "block":
            if attempt.queued:  # another producer was faster, or the server has no memory
                self._pause(attempt, reply)
            self.scarce = True
        elif (
            self._evicts and reply.setting != "max_waiting" and attempt.refused <= EVICTION_ATTEMPTS
        ):
            self._evict(attempt, reply)
        else:
            raise self._full(attempt, reply)

    def evicting(self, attempt: Attempt, least: int) -> Evict:
        """Return the call that evicts waiting groups until some groups of a put have room."""
        pending, batch = attempt.pending, attempt.batch
        return Evict(
            producer=pending.identity.name,
            operation=pending.identity.operation,
            epoch=pending.epoch,
            groups=len(batch.groups),
            nbytes=batch.nbytes,
            least=least,
            stalest=self._on_full == "drop_stalest",
        )

    def leave(self, attempt: Attempt) -> None:
        """Give the room that was kept for a put that ends without it to producers that wait."""
        if attempt.queued or attempt.evict is not None:
            with suppress(StoreError):  # the place in the queue ends by itself
                self._store.call(AskRoom(attempt.pending.identity.name, 0))

    def _try_fewer(self, attempt: Attempt) -> None:
        groups = attempt.batch.groups
        if len(groups) == 1:
            error = ConfigError(
                f"task {self._store.task!r}: a group of {groups[0].nbytes} bytes is "
                "larger than max_bytes: raise it, or make groups smaller."
            )
            error.bad_groups = (len(attempt.pending.ids),)
            raise error
        attempt.most = max(1, len(groups) // 2)

    def _evict(self, attempt: Attempt, reply: PutReply) -> None:
        """Evict groups now, or let the next attempt evict them."""
        if reply.setting == "memory":  # memory is freed by whole nodes of entries: ask for more
            least = len(attempt.batch.groups) << attempt.refused
            self._store.call(self.evicting(attempt, least))
            attempt.evict = None
            return
        if attempt.evict is None:
            attempt.evict = 0
            return
        more = True
        # a limit was lowered, or leased groups stand before those that may go
        while more and not here().pages_over:
            more = self._store.call(self.evicting(attempt, 0)).more

    def _pause(self, attempt: Attempt, reply: PutReply) -> None:
        """Wait in the queue until groups were acknowledged, for one slice of time at most."""
        name, deadline = attempt.pending.identity.name, here()
        if deadline.over:
            raise self._full(attempt, reply, self._where())
        keys = self._store.keys
        deadline.log(f"task {self._store.task!r} has no room: a put waits", keys.namespace)
        self._store.wait_for_wake(name)

    def _where(self) -> str:
        """Return where the stored groups are, as far as this user may look."""
        store, found = self._store, []
        with suppress(StoreError), Deadline(repeat_s=0.0):
            names = sorted(store.client.execute("SMEMBERS", store.keys.groups))
            for name in (each.decode(errors="replace") for each in names[:MOST_NAMED]):
                ledger = stats_of(store, name).ledger
                wait = counted(ledger.waiting, "group", "wait")
                leased = f"{ledger.leased:,} {agreeing(ledger.leased, 'are')} leased"
                found.append(f"of consumer group {name!r} {wait} and {leased}")
            if len(names) > 1:
                return f": {'; '.join(found)}. A group makes room when all have acknowledged it"
            return f": {found[0]}" if found else ": no consumer group has taken yet"
        return ""

    def _full(self, attempt: Attempt, reply: PutReply, where: str = "") -> StoreFull:
        """Return the error of an attempt that found no room."""
        namespace, reason = self._store.keys.namespace, reply.setting
        task = f"task {self._store.task!r} of namespace {namespace!r}"
        if reason == "memory":
            message = (
                f"Redis at {self._store.client.where} is at its memory limit and {task} cannot "
                "grow: raise maxmemory, or let trainers catch up."
            )
        elif reason == "max_waiting":
            message = (
                f"{task} holds as many waiting groups as its max_waiting allows: trainers must "
                "take some, or raise it."
            )
        else:
            message = (
                f"{task} is full and nothing made room{where}. Trainers must take and acknowledge "
                f"groups (`redrb top --namespace {namespace}`), or raise limit / max_bytes."
            )
        return StoreFull(
            message,
            task=self._store.task,
            namespace=namespace,
            stored=len(attempt.pending.ids),
            reason=reason,
        )
