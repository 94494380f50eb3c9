"""Stores groups in a task exactly once, a chunk of them a transaction.

Why no group is stored twice: a chunk gets an operation number and an epoch before it is sent, and
all attempts to store it name these. The task keeps the last number of each producer: the attempt
that comes first stores the groups, and later ones are answered "again". A task that may have
deleted the number answers "forgotten", and stores nothing; if an earlier attempt may have been
stored, the put ends with `OutcomeUnknown` then.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque

from redrb.connection.client import Request
from redrb.connection.deadline import WARN_EVERY_S, here
from redrb.connection.transport import Replication
from redrb.errors import OutcomeUnknown, RedrbError, StoreFull, StoreUnavailable
from redrb.forks import in_child
from redrb.stream.put.batch import PutBatch, packed_facts
from redrb.stream.put.calls import AskRoom, PutReply, RoomReply
from redrb.stream.put.fitting import fitted
from redrb.stream.put.options import SourcesRefused
from redrb.stream.put.pending import Attempt, PendingPut, ProducerIdentity
from redrb.stream.put.refusals import OnBadGroup
from redrb.stream.put.rights import NO_RIGHTS
from redrb.stream.put.room import OnFull, Room
from redrb.stream.task.task import Task
from redrb.stream.worker import Worker
from redrb.unpacking import Reading
from redrb.words import counted

_log = logging.getLogger("redrb")


class PartsEnded(Exception):
    """The parts of a group have become `group` before, or were removed; it was not put again."""

    def __init__(self, group: int | None) -> None:
        self.group = group
        super().__init__(group)


class Producer:
    """Puts encoded groups into one task; safe among threads.

    `put` is `send`, `finish` and `abandon` in one call.
    """

    def __init__(
        self,
        task: Task,
        on_full: OnFull,
        replication: Replication,
        on_bad_group: OnBadGroup,
        worker: Worker,
    ) -> None:
        self._worker = worker
        self._on_bad_group = on_bad_group
        self._task, self._store = task, task.store
        self._replication = replication
        self._known = False
        self._room = Room(task, on_full)
        self._arrivals = StaleArrivals(task.name)
        self._epoch = Epoch(task)
        self._begin()
        in_child(self._begin)

    def _begin(self) -> None:
        self._idle: deque[ProducerIdentity] = deque()

    def put(self, batch: PutBatch) -> tuple[int, ...]:
        """Store groups; returns their ids in order.

        Raises:
            StoreFull: No room in time.
            StoreUnavailable: Redis stayed away.
            ConfigError: A group is larger than the task's limits.
            OutcomeUnknown: Redis was away for so long that nobody knows whether groups are stored.
            SourcesRefused: Forwarded groups were stored before, or have left their task.
            All of them: `stored` says how many groups, from the first, are certainly stored.
        """
        pending = self.new(batch)
        try:
            return self.finish(pending)
        finally:
            self.abandon(pending)

    def new(self, batch: PutBatch) -> PendingPut:
        """Return a put of which nothing was sent; `abandon` must follow."""
        self._worker.puts()
        try:
            identity = self._idle.pop()
        except IndexError:
            identity = ProducerIdentity()
        return PendingPut(identity, batch, self._idle)

    def ask_room(self, pending: PendingPut, *, ttl_ms: int) -> Request[RoomReply]:
        """Return the request that queues for room for the next groups of a put; 0: leave."""
        sizes = [group.nbytes for group in pending.chunk().groups] if ttl_ms else []
        asked = AskRoom(pending.identity.name, ttl_ms, sizes)
        return asked.as_request(self._store.client, self._store.script_keys, lambda reply: reply)

    def send(self, batch: PutBatch) -> PendingPut:
        """Send groups without waiting for the reply; `finish` must follow.

        `sent` of the returned put is None where nothing was sent, because the groups do not fit
        into one transaction, room is scarce, or the epoch must be read first.
        """
        pending = self.new(batch)
        whole = len(pending.chunk().groups) == len(batch.groups)
        if whole and not self._room.scarce and self._epoch.is_fresh:
            try:
                pending.number(*self._epoch.current())
                pending.sent = self._request(Attempt(pending))
                pending.sent.begin()
            except BaseException:
                self.abandon(pending)
                raise
        return pending

    def finish(self, pending: PendingPut) -> tuple[int, ...]:
        """Wait until all groups are stored; raises as `put` does, and may be called again then."""
        ids, over = pending.ids, False
        try:
            while not over:  # a put without groups is sent, too, for what it counts
                self._store_chunk(pending)
                over = len(ids) == len(pending.batch.groups)
        except BaseException as error:
            if isinstance(error, StoreUnavailable):
                error.uncertain = pending.repeated
            if isinstance(error, RedrbError):
                error.stored = len(ids)
                if ids:
                    error.add_note(
                        f"{counted(len(ids), 'group', 'were')} stored before this, of "
                        f"{len(pending.batch.groups)}."
                    )
            raise
        batch = pending.batch
        self._worker.count(len(ids), sum([each.samples for each in batch.groups]), batch.filtered)
        return tuple(ids)

    def abandon(self, pending: PendingPut) -> None:
        """End a put, and let others use its identity.

        Groups that are not stored yet may still arrive, once, if an attempt was interrupted.
        """
        if pending.sent is not None:
            pending.sent.drop()
        pending.identity.interrupted |= pending.repeated or pending.sent is not None
        if pending.batch.rights is not NO_RIGHTS:
            pending.batch.rights.end(len(pending.ids), counted=pending.counted)
        pending.idle.append(pending.identity)

    def close(self) -> None:
        """Delete the last operation numbers of this producer in Redis; its groups stay.

        Identities with an interrupted attempt are kept: the attempt may still arrive.
        """
        idle, self._idle = self._idle, deque()
        over = [identity.name for identity in idle if not identity.interrupted]
        if over:
            self._store.client.execute("HDEL", self._store.keys.puts, *over)

    def _store_chunk(self, pending: PendingPut) -> None:
        """Store the next chunk, or as many of its groups, from the first, as there is room for."""
        if not pending.numbered:
            pending.number(*self._epoch.current())
        attempt = Attempt(pending)
        try:
            while True:
                request = self._next_request(attempt)
                reply = self._reply(pending, request)
                if reply.outcome in ("ok", "again"):
                    break
                self._go_on(attempt, reply)
        except StoreUnavailable:
            raise  # an attempt may still arrive: its room is kept
        except (RedrbError, PartsEnded, SourcesRefused):
            self._room.leave(attempt)
            raise
        batch, description = pending.batch, self._task.description
        if batch.kind != description.kind == "" and batch.revision == description.revision:
            self._task.note_kind(batch.kind)
        self._arrivals.note(reply.stored, reply.expired)
        self._room.scarce = 0 <= reply.room < len(pending.chunk().groups)
        pending.note_stored(reply)

    def _go_on(self, attempt: Attempt, reply: PutReply) -> None:
        """Do what an attempt needs that stored nothing, before the next one; or raise its error."""
        pending = attempt.pending
        match reply.outcome:
            case "full" | "never":
                self._make_room(attempt, reply)
            case "gone" | "changed":  # the task was deleted, or has other settings or another kind
                self._reopen(pending)
            case "forgotten":  # the task may have deleted the record of this producer
                self._renew(pending, reply.epoch)
            case "more":  # entries of failed puts are removed, a page a call
                if here().pages_over:
                    raise self._store.unfinished()
            case "known" | "past":
                raise SourcesRefused(reply.origin or None)
            case "ended":
                raise PartsEnded(reply.last or None)

    def _next_request(self, attempt: Attempt) -> Request[PutReply]:
        """Return the request that was sent ahead, or that of an attempt, once it may have room."""
        request, attempt.pending.sent = attempt.pending.sent, None
        if request is None:
            if self._room.scarce:
                self._room.reserve(attempt)
            request = self._request(attempt)
        return request

    def _reply(self, pending: PendingPut, request: Request[PutReply]) -> PutReply:
        """Return the reply to an attempt.

        `repeated` is True while the reply is not known, and stays so if this attempt, or one
        before, may have been stored without a reply.
        """
        before, pending.repeated = pending.repeated, True
        try:
            reply = request.result()
        except StoreUnavailable as error:
            pending.repeated = before or error.uncertain
            raise
        except StoreFull:
            # a server without memory refuses a repetition before the script can answer "again"
            pending.repeated = before or request.attempts > 1
            looks = pending.repeated and not self._replication.min_replicas
            return (looks and self._find_stored(pending)) or PutReply("full", setting="memory")
        pending.repeated = before or request.attempts > 1
        return reply

    def _request(self, attempt: Attempt) -> Request[PutReply]:
        """Return the request that stores the groups of an attempt in one transaction."""
        batch, description = attempt.batch, self._task.description
        facts = packed_facts(description, batch)
        first, self._known = not self._known, True  # the first put brings the text of the script
        return attempt.pending.call(batch, description).storing(
            self._store,
            batch.groups,
            facts,
            self._replication,
            evict=None if attempt.evict is None else self._room.evicting(attempt, attempt.evict),
            whole=first,
        )

    def _make_room(self, attempt: Attempt, reply: PutReply) -> None:
        """Make room, or wait for it."""
        try:
            with self._worker.waiting("room"):
                self._room.make(attempt, reply)
        except StoreFull as error:
            pending = attempt.pending
            stored = pending.repeated and self._find_stored(pending)
            if not stored:
                raise
            groups = counted(stored.stored, "group", "are")
            raise OutcomeUnknown(
                f"task {self._task.name!r}: {groups} stored, but the connection broke before "
                "enough replicas (min_replicas) had confirmed them, and the put cannot be "
                "repeated: Redis is at its memory limit. Do not put them again, unless the server "
                "fails over to a replica that lacks them.",
                groups=stored.stored,
            ) from error

    def _reopen(self, pending: PendingPut) -> None:
        """Prepare a put for the task as it is now."""
        self._task.reopen(refused_here=True)
        pending.batch = fitted(pending, self._task, self._on_bad_group)
        incarnation, epoch = self._epoch.current()
        if incarnation != pending.incarnation:
            # nothing of an earlier attempt is stored there, nor can it be any more
            pending.incarnation, pending.epoch, pending.repeated = incarnation, epoch, False

    def _renew(self, pending: PendingPut, epoch: int) -> None:
        """Let a put that was certainly not stored name the epoch of now."""
        self._epoch.learn(epoch)
        if pending.repeated:
            groups = counted(len(pending.chunk().groups), "group", "are")
            raise OutcomeUnknown(
                f"task {self._task.name!r}: nobody knows whether {groups} stored: the connection "
                "broke, and when Redis was reached again, the task had forgotten the last "
                "put of this producer. Put them again if a group that is stored twice does less "
                "harm than a lost one.",
                groups=len(pending.chunk().groups),
            )
        pending.epoch = epoch
        self._store.refused(self._store.keys.puts, epoch)

    def _find_stored(self, pending: PendingPut) -> PutReply | None:
        """Return the reply of an earlier attempt that was stored; None if none was."""
        store, identity = self._store, pending.identity
        record = store.client.execute("HGET", store.keys.puts, identity.name)
        with Reading(f"the record of producer {identity.name}"):
            operation, last, count = map(int, record.split()[:3]) if record else (0, 0, 0)
        stored = operation == identity.operation
        return PutReply("again", last=last, stored=count) if stored else None


FRESH_S = 1200.0
"""Age at which the epoch is read again: a third of the shortest epoch (`include/producers.lua`).

A put that names an older epoch is refused and sent again, so this is about round trips only.
"""


class Epoch:
    """The epoch that new puts name; safe among threads."""

    def __init__(self, task: Task) -> None:
        self._task = task
        description = task.description
        self._learned = (description.incarnation, description.epoch, time.monotonic())

    @property
    def is_fresh(self) -> bool:
        """Whether it is known without a request."""
        incarnation, _, learned = self._learned
        fresh = time.monotonic() - learned < FRESH_S
        return fresh and incarnation == self._task.description.incarnation

    def current(self) -> tuple[str, int]:
        """Return the task's incarnation and the epoch in it; reads it again when it is old."""
        if not self.is_fresh:
            store = self._task.store
            stored = store.client.execute("HGET", store.keys.puts, "epoch")
            with Reading("the epoch of the records of producers"):
                self.learn(int(stored or 0))
        incarnation, epoch, _ = self._learned
        return incarnation, epoch

    def learn(self, epoch: int) -> None:
        """Note the epoch that the task has named."""
        self._learned = (self._task.description.incarnation, epoch, time.monotonic())


STALE_ROW = 8
"""Groups in a row that expire on arrival before a producer warns."""


class StaleArrivals:
    """Warns when every group of a producer expires on arrival: nothing is ever trained then."""

    def __init__(self, task: str) -> None:
        self._task = task
        self._row = 0
        self._warned_at = -math.inf

    def note(self, groups: int, expired: int) -> None:
        """Count the groups of one reply, and those of them that expired on arrival."""
        if not expired or expired < groups:
            self._row = 0
            return
        self._row += groups
        now = time.monotonic()
        if self._row >= STALE_ROW and now - self._warned_at >= WARN_EVERY_S:
            self._warned_at = now
            _log.warning(
                "task %r: each of the last %d groups was too stale on arrival, none is left to "
                "train on: raise max_staleness, publish weights less often, or make groups faster",
                self._task,
                self._row,
            )
