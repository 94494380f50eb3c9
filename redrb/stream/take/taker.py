"""`Taker`: takes full batches for a consumer, and waits; what was claimed becomes a lease."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from redrb.codec import GroupLayout, parse_group
from redrb.connection.client import Request
from redrb.connection.deadline import here
from redrb.errors import BatchTimeout, ConfigError, DecodeError, LeaseLost
from redrb.experience import Status
from redrb.stream.take.calls import Search, Take, TakeReply, TakeRequest
from redrb.stream.take.cause import Cause
from redrb.stream.take.consumer import Consumer, Slot
from redrb.stream.take.lease import Lease
from redrb.stream.take.part import Draw, Expiry, Holder, LeasePart, end_parts, raise_alone
from redrb.stream.take.rollout_reading import ROLLOUT, read_rollouts
from redrb.stream.take.unfilled import batch_timeout, never_full
from redrb.stream.task.entries import member_of
from redrb.stream.task.origin import Origin
from redrb.stream.task.queries import no_query
from redrb.stream.task.store import QUEUE_TTL_MS, TaskStore
from redrb.stream.task.task import Task
from redrb.unpacking import Reading
from redrb.words import agreeing, counted

_log = logging.getLogger("redrb")


class Taker:
    """Takes full batches of a task for one consumer; safe among threads."""

    def __init__(self, task: Task, consumer: Consumer) -> None:
        self._task = task
        self._store = task.store
        self._consumer = consumer

    def take(
        self,
        request: TakeRequest,
        ack: Lease | None = None,
        *,
        waiter: str = "",
        look: Callable[[], None] | None = None,
    ) -> Lease:
        """Lease all groups of a request, or none.

        Args:
            ack: A lease of this consumer to acknowledge in the same round trip.
            waiter: Its name, where others than makers wake it, too.
            look: Is called after each wait, and may end this thread's deadline.

        Raises:
            BatchTimeout: Too few groups came in time; none was taken.
            LeaseLost: Another consumer has taken `ack` over; nothing was taken.
            ConfigError: The task's limit is smaller than `request.least`, or `ack` is a lease of
                another consumer.
        """
        with self._consumer.worker.waiting("batch"):
            before = self._part_of(ack)
            while True:
                slot = self._consumer.occupy()
                try:
                    reply = self._full_batch(slot, request, before, waiter or slot.waiter, look)
                    before = None
                    lease = None
                    if reply.outcome == "taken":
                        lease = self._claimed(slot, request, reply)
                    else:  # this consumer was silent, and others have taken the lease over
                        slot.free()
                except (BatchTimeout, ConfigError, LeaseLost):  # nothing is leased in the slot
                    slot.free()
                    raise
                except BaseException:
                    slot.give_up()
                    raise
                if lease is not None:
                    return lease
                if here().pages_over:
                    raise self._timeout(request, TakeReply("more"), 0)

    def take_once(
        self, request: TakeRequest, *, waiter: str, search: Search | None = None, ttl_ms: int = 0
    ) -> tuple[TakeReply, Lease | None]:
        """Take in one request for a waiter that may queue in several tasks; the caller waits.

        Args:
            request: The groups; fewer than `count` may come.
            waiter: Its name, for which groups may be reserved.
            search: Of the reply to an earlier take, where that was "more".
            ttl_ms: How long the waiter queues where too few groups wait; 0: it leaves the queue.

        Returns:
            The reply, which `accept` is given, and the lease, if groups were taken.
        """
        slot = self._consumer.occupy()
        try:
            asked = self._request(slot, request, ttl_ms, None, waiter, report=False, search=search)
            reply = asked.result()
            if reply.outcome == "taken":
                return reply, self._claimed(slot, request, reply)
            slot.free()
        except BaseException:
            slot.give_up()
            raise
        return reply, None

    def _claimed(self, slot: Slot, request: TakeRequest, reply: TakeReply) -> Lease | None:
        """Return the lease on a batch; None if a group of it could not be decoded.

        Groups that cannot be decoded go to the dead letters; the others are requeued.
        """
        slot.count(len(reply.entries))
        draw = None
        if reply.weights:
            ids = [seq for seq, _ in reply.entries]
            draw = Draw(dict(zip(ids, reply.weights, strict=True)), reply.total_weight)
        part = claimed_part(
            self._store,
            self._consumer,
            reply.entries,
            slot,
            status=request.status,
            incarnation=reply.incarnation,
            draw=draw,
            first_ids=reply.first_ids,
            least=min(request.least, request.count),
        )
        return None if part is None else Lease([part])

    def is_fresh(self, lease: Lease) -> bool:
        """Return whether a batch that was taken ahead may be handed over.

        In a task with a bound of staleness it may not if one of its groups has become too stale
        since it was taken, or if another consumer has it. Then the lease is over: its groups wait
        again, and those that are too stale have expired. Tasks without a bound are not asked.

        Raises:
            StoreUnavailable: Redis stayed away; the batch is still leased.
        """
        if not self._task.description.staleness.any:
            return True
        for part in lease.parts:
            slot = part.holder
            if not isinstance(slot, Slot) or not part or part.status is Status.EXPIRED:
                continue
            part.check_own()
            if not self._consumer.recheck(slot, part.status, part.ids):
                part.note_ended(part.ids)
                return False
        return True

    def _note_acknowledged(self, before: LeasePart, slot: Slot, reply: TakeReply) -> None:
        """Close the lease that a take has acknowledged.

        Raises:
            LeaseLost: Another consumer had taken it over; the batch of this take is released.
        """
        if not before.layouts or not isinstance(before.holder, Slot):
            return
        before.holder.free()
        if not reply.held and reply.outcome == "taken":
            slot.requeue([seq for seq, _ in reply.entries])
        before.note_ended(before.ids, "" if reply.held else before.holder.loss)

    def _part_of(self, ack: Lease | None) -> LeasePart | None:
        """Return the part of a lease to acknowledge; it must be held by this consumer."""
        if ack is None:
            return None
        part, *further = ack.parts
        holder = part.holder
        if further or not isinstance(holder, Slot) or holder.consumer is not self._consumer:
            raise ConfigError("take(ack=...) acknowledges leases of the same stream object only.")
        part.check_own()
        if part.asked_otherwise("ack", part.ids):
            raise_alone(end_parts("ack", [(part, part.ids)]).get(part))
        for page in part.pages("ack", part.ids)[:-1]:  # the take acknowledges the last one
            raise_alone(end_parts("ack", [(part, page)]).get(part))
        return part

    def _full_batch(
        self,
        slot: Slot,
        request: TakeRequest,
        before: LeasePart | None,
        waiter: str,
        look: Callable[[], None] | None,
    ) -> TakeReply:
        """Ask until the batch is full; returns the reply "taken", or "late"."""
        expired, deadline, search = 0, here(), None
        while True:
            last = deadline.over
            accepted = request if last else request.full
            ttl_ms = 0 if last else QUEUE_TTL_MS
            sent = self._request(slot, accepted, ttl_ms, before, waiter, report=last, search=search)
            reply = sent.result()
            search = reply.search
            if reply.outcome == "gone":
                self._task.reopen(refused_here=True)
            if before is not None:
                self._note_acknowledged(before, slot, reply)
                before = None
            expired += reply.expired
            if reply.outcome in ("taken", "late"):
                return reply
            if reply.outcome in ("gone", "more"):
                # "more": its consumer group joins, much expires, or many are looked at, in parts
                if deadline.pages_over:
                    raise self._timeout(request, reply, expired)
                continue
            self._refuse(request, reply)
            if last:
                raise self._timeout(request, reply, expired)
            if reply.outcome == "short":
                deadline.log(
                    f"task {self._store.task!r}, consumer group {self._consumer.group!r}: "
                    f"{reply.amount} of {counted(request.count, 'group', 'are')} waiting, "
                    f"{expired} {agreeing(expired, 'were')} too stale, and "
                    f"{counted(reply.blocked, 'maker', 'wait')} for room",
                    self._store.keys.namespace,
                )
                self._store.wait_for_wake(waiter)
                if look is not None:
                    look()

    def _timeout(self, request: TakeRequest, reply: TakeReply, expired: int) -> BatchTimeout:
        leased_here = self._consumer.held
        return batch_timeout(
            self._task, request.least, reply, leased_here=leased_here, expired=expired
        )

    def accept(self, request: TakeRequest, reply: TakeReply) -> None:
        """Open the task again if it is gone; raises as `take` does where waiting cannot help."""
        if reply.outcome == "gone":
            self._task.reopen(refused_here=True)
        self._refuse(request, reply)

    def _refuse(self, request: TakeRequest, reply: TakeReply) -> None:
        """Raise the error of a take that no waiting can help."""
        task = self._store.task
        if reply.outcome == "never":
            raise never_full(self._task, request.least, reply.amount)
        if reply.outcome == "drawn":
            raise no_query(task)

    def _request(
        self,
        slot: Slot,
        request: TakeRequest,
        ttl_ms: int,
        before: LeasePart | None,
        waiter: str = "",
        *,
        report: bool,
        search: Search | None = None,
    ) -> Request[TakeReply]:
        consumer, description = self._consumer, self._task.description
        first = None
        if before is not None:
            before.note_asked("ack", before.ids)
            if before.layouts and isinstance(before.holder, Slot):
                first = before.holder.ending("ack", before.ids, samples=before.samples)
        take = Take(
            consumer.group,
            consumer.name,
            slot.name,
            slot.token,
            request,
            waiter or slot.waiter,
            ttl_ms,
            consumer.lease_ms,
            description.revision,
            report,
            search,
        )
        return take.with_payload(self._store, description.incarnation, first)


def claimed_part(
    store: TaskStore,
    consumer: Consumer,
    entries: Sequence[tuple[int, bytes | None]],
    holder: Holder,
    *,
    status: Status,
    incarnation: str,
    draw: Draw | None,
    first_ids: Mapping[int, int],
    least: int,
) -> LeasePart | None:
    """Return the part of a lease that holds claimed entries.

    Groups that cannot be decoded go to the dead letters, with the reason.

    Args:
        entries: Id and payload of each group that a script claimed for `holder`; None: it is gone.
        first_ids: First id of the groups that were requeued with another one.
        least: Fewest groups in a part. A claim with fewer, or of which a group cannot be decoded,
            is released.

    Returns:
        The part; None when the claim was released, or another consumer has taken it over.

    Raises:
        ConfigError, RecordError: Groups of rollouts cannot be read. After this, and after any error
            of the reader, the claim was released.
    """
    good: list[tuple[int, GroupLayout]] = []
    bad: list[tuple[int, DecodeError]] = []
    for seq, payload in entries:
        try:
            if payload is None:
                raise DecodeError("the payload is gone")
            good.append((seq, parse_group(payload)))
        except DecodeError as error:
            bad.append((seq, error.with_traceback(None)))
    for seq, why in bad:
        _log.error("task %r: group %d cannot be decoded: %s", store.task, seq, why)
        ends = not good and seq == bad[-1][0]
        reason = Cause.of(why, "cannot be decoded: ")
        if holder.end_request("reject", [seq], reason=reason, samples=0, ends=ends).result():
            return None  # it is lost
    ids = [seq for seq, _ in good]
    rollouts = frozenset(seq for seq, layout in good if ROLLOUT in layout.extras[0])
    try:
        for place, (seq, layout) in enumerate(good if rollouts else ()):
            if seq in rollouts:
                good[place] = seq, read_rollouts(store.task, seq, layout, consumer.reader)
    except BaseException:
        holder.release(ids)
        raise
    if not bad and len(good) >= least:
        expiries = _expiries(store, consumer.group, ids) if status is Status.EXPIRED else {}
        return LeasePart(
            store.task,
            good,
            holder,
            incarnation=incarnation,
            draw=draw,
            expiries=expiries,
            status=status,
            rollouts=rollouts,
            origin=Origin(store, consumer.group, incarnation),
            first_ids=first_ids,
        )
    if good or not bad:
        holder.release(ids)
    return None


def _expiries(store: TaskStore, group: str, ids: Sequence[int]) -> dict[int, Expiry | None]:
    key = f"{store.keys.prefix}expiries:{group}"
    texts = store.client.execute("HMGET", key, *map(member_of, ids))
    with Reading("the rules by which groups expired"):
        return {
            seq: text and Expiry.parse(text.decode()) for seq, text in zip(ids, texts, strict=True)
        }
