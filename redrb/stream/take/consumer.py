"""The side of trainers: full batches are leased, held by a heartbeat, and ended."""

from __future__ import annotations

import itertools
import logging
import os
import socket
import threading
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from redrb.codec import GroupLayout, parse_groups
from redrb.connection.request import Request
from redrb.errors import BatchTimeout, ConfigError, DecodeError, LeaseLost, StoreError
from redrb.experience import Status
from redrb.stream.take.heartbeat import Heartbeat
from redrb.stream.take.lease import Drawn, Expiry, Lease
from redrb.stream.take.scripts import Ending, Outcome, TakeReply, TakeScripts
from redrb.stream.task.store import TaskStore
from redrb.stream.waiting import QUEUE_TTL_MS, Wait

_log = logging.getLogger("redrb")

SETTLE_S = 1.0
"""How long Redis may be away while takes that nobody waits for are given back."""


@dataclass(frozen=True, slots=True)
class _Slot:
    """One lease's place in a consumer."""

    consumer: Consumer
    number: int
    token: str

    def finish(
        self,
        outcome: Outcome,
        ids: Sequence[int],
        *,
        reason: str = "",
        samples: int = 0,
        ends: bool,
    ) -> bool:
        held = self.consumer.finish(
            self.number, self.token, outcome, ids, reason=reason, samples=samples, ends=ends
        )
        if ends or not held:
            self.consumer.free(self.number)
        return held

    def abandon(self, ids: tuple[int, ...]) -> None:
        self.consumer.abandon(self, ids)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a take asks for.

    Attributes:
        count: Groups.
        least: Groups that do when the time is up.
        status: Their status.
        where: A query that they match, as Redis reads it; "": any.
    """

    count: int
    least: int
    status: Status = Status.COMPLETED
    where: str = ""


@dataclass(frozen=True, slots=True)
class Ahead:
    """A take that was sent and whose reply was not read yet.

    Attributes:
        slot: Where its lease will be.
        token: Its token.
        request: The take.
        ack: The lease that it acknowledges.
    """

    slot: int
    token: str
    request: Request[TakeReply]
    ack: Lease | None


class Consumer:
    """One member of a consumer group; safe among threads."""

    def __init__(
        self, store: TaskStore, group: str, lease_ms: int, reopen: Callable[[], None]
    ) -> None:
        """Make a consumer; its heartbeat begins with the first take.

        Args:
            store: The task.
            group: Name of the consumer group.
            lease_ms: Silence after which others take its leases over.
            reopen: Creates the task again after somebody cleared it.
        """
        self._store = store
        self._scripts = TakeScripts(store)
        self._group = group
        self._lease_ms = lease_ms
        self._reopen = reopen
        self._begin()

    def _begin(self) -> None:
        """Become a consumer that Redis does not know yet: at first, and in a forked process."""
        self._pid = os.getpid()
        self.name = f"{socket.gethostname()[:32]}-{self._pid}-{uuid.uuid4().hex[:12]}"
        self._tokens = itertools.count(1)
        self._slots: set[int] = set()
        self._abandoned: deque[tuple[_Slot, tuple[int, ...]]] = deque()
        self._aheads: deque[Ahead] = deque()
        self._lock = threading.Lock()
        self._heartbeat: Heartbeat | None = None

    def take(self, wanted: Wanted, timeout: float | None, ack: Lease | None = None) -> Lease:
        """Lease what is wanted, all of it or nothing.

        Args:
            wanted: What.
            timeout: Seconds to wait.
            ack: A lease of this consumer to acknowledge in the same round trip.

        Raises:
            BatchTimeout: Fewer came in time; none was taken.
            LeaseLost: `ack` is another consumer's by now; nothing was taken.
            ConfigError: The task's limit is smaller than `wanted.least`, or `ack` is of another
                consumer.
        """
        self._check_own(ack)
        slot = self._occupy()
        wait = Wait(timeout)
        try:
            while True:
                token = str(next(self._tokens))
                reply = self._take_full(slot, token, wanted, wait, ack)
                ack = None
                lease = self._lease(slot, token, reply, wanted)
                if lease is not None:
                    return lease
        except BaseException:
            self.free(slot)
            raise

    def begin_take(self, wanted: Wanted, ack: Lease | None) -> Ahead:
        """Ask for full batch, if it is there, and do not wait for the reply."""
        self._check_own(ack)
        slot = self._occupy()
        try:
            token = str(next(self._tokens))
            request = self._request(slot, token, wanted, wanted.count, ttl_ms=0, ack=ack)
            request.begin()
            return Ahead(slot, token, request, ack)
        except BaseException:
            self.free(slot)
            raise

    def receive(self, ahead: Ahead, *, timeout: float | None) -> TakeReply | None:
        """Return what `begin_take` has leased; None when the batch was not full.

        Raises:
            LeaseLost: The lease to acknowledge is another consumer's by now; nothing was taken.
        """
        taken = False
        try:
            reply = ahead.request.result(retry_s=Wait(timeout).retry_s)
            if ahead.ack is not None:
                self._conclude(ahead.ack, reply, ahead.slot, ahead.token)
            taken = reply.outcome == "taken"
            return reply if taken else None
        finally:
            if not taken:
                self.free(ahead.slot)

    def lease_of(self, ahead: Ahead, reply: TakeReply, wanted: Wanted) -> Lease | None:
        """Return the lease that was received; None when something of it could not be decoded."""
        lease = None
        try:
            lease = self._lease(ahead.slot, ahead.token, reply, wanted)
            return lease
        finally:
            if lease is None:
                self.free(ahead.slot)

    def give_back(self, ahead: Ahead, reply: TakeReply) -> None:
        """Release what was received."""
        try:
            seqs = [seq for seq, _ in reply.entries]
            self.finish(ahead.slot, ahead.token, "release", seqs, ends=True)
        finally:
            self.free(ahead.slot)

    def attend(self) -> None:
        """Begin to beat, so that others' leases are taken over, before the first take."""
        if self._pid != os.getpid():
            self._begin()
        self._start_heartbeat()

    def close(self) -> None:
        """Stop the heartbeat and give back what is still leased, unharmed."""
        if self._pid != os.getpid():
            return  # a fork of the consumer: its leases are its parent's
        with self._lock:
            heartbeat, self._heartbeat = self._heartbeat, None
        if heartbeat is not None:
            heartbeat.stop()
            self._settle_aheads()
            self._scripts.leave(self._group, self.name)

    def _check_own(self, ack: Lease | None) -> None:
        if ack is not None and not (isinstance(ack.holder, _Slot) and ack.holder.consumer is self):
            raise ConfigError("take(ack=...) acknowledges leases of the same stream object only.")

    def _occupy(self) -> int:
        """Return a slot that no lease of this consumer uses; its heartbeat beats from now on."""
        if self._pid != os.getpid():
            self._begin()
        self._start_heartbeat()
        with self._lock:
            slot = next(number for number in itertools.count() if number not in self._slots)
            self._slots.add(slot)
        return slot

    def _lease(self, slot: int, token: str, reply: TakeReply, wanted: Wanted) -> Lease | None:
        """Return the lease on what was taken; None when something of it could not be decoded.

        That goes to the dead letters, and the rest back.
        """
        good: list[tuple[int, GroupLayout]] = []
        bad: list[tuple[int, str]] = []
        parsed = iter(parse_groups(own for _, own in reply.entries if own is not None))
        for seq, payload in reply.entries:
            layout = next(parsed) if payload is not None else DecodeError("the payload is gone")
            if isinstance(layout, DecodeError):
                bad.append((seq, f"cannot be decoded: {layout}"))
            else:
                good.append((seq, layout))
        if not bad and len(good) >= min(wanted.least, wanted.count):
            drawn = Drawn(reply.weights, reply.total_weight) if reply.weights else None
            lease = Lease(self._store.task, good, _Slot(self, slot, token), drawn)
            if wanted.status is Status.EXPIRED:
                lease.expiries = self._expiries(lease.ids)
            return lease
        for index, (seq, reason) in enumerate(bad):
            _log.error("task %r: group %d %s", self._store.task, seq, reason)
            ends = not good and index == len(bad) - 1
            self.finish(slot, token, "reject", [seq], reason=reason, ends=ends)
        if good:
            self.finish(slot, token, "release", [seq for seq, _ in good], ends=True)
        return None

    def _expiries(self, ids: Sequence[int]) -> dict[int, Expiry | None]:
        told = self._scripts.expiries(self._group, ids)
        return {
            seq: None if text is None else Expiry.parse(text)
            for seq, text in zip(ids, told, strict=True)
        }

    def _request(
        self,
        slot: int,
        token: str,
        wanted: Wanted,
        least: int,
        *,
        ttl_ms: int,
        ack: Lease | None,
    ) -> Request[TakeReply]:
        return self._scripts.take(
            self._group,
            self.name,
            self._name_of(slot),
            token,
            count=wanted.count,
            least=least,
            status=wanted.status,
            where=wanted.where,
            waiter=self._waiter(slot),
            ttl_ms=ttl_ms,
            lease_ms=self._lease_ms,
            first=None if ack is None else self._acknowledgement(ack),
        )

    def _waiter(self, slot: int) -> str:
        return f"{self.name}.{slot}"

    def _take_full(
        self, slot: int, token: str, wanted: Wanted, wait: Wait, ack: Lease | None
    ) -> TakeReply:
        count, expired = wanted.count, 0
        while True:
            last = wait.over
            ttl_ms = 0 if last else QUEUE_TTL_MS
            least = wanted.least if last else count
            request = self._request(slot, token, wanted, least, ttl_ms=ttl_ms, ack=ack)
            reply = request.result(retry_s=wait.retry_s)
            if ack is not None:
                self._conclude(ack, reply, slot, token)
                ack = None
            expired += reply.expired
            if reply.outcome == "taken":
                return reply
            if reply.outcome == "never":
                raise ConfigError(
                    f"task {self._store.task!r} holds at most {reply.amount} groups: a batch of "
                    f"{count} can never be full. Take fewer, or raise the limit."
                )
            if reply.outcome == "late":
                raise StoreError(
                    f"task {self._store.task!r}: a later take of this consumer was there first; "
                    "nothing was taken."
                )
            if reply.outcome == "more":  # its consumer group joins, or much expires, in parts
                continue
            if reply.outcome == "ranks":
                raise ConfigError(
                    f"task {self._store.task!r}: ranks take from consumer group {self._group!r}, "
                    "and nobody else may meanwhile: use another group=."
                )
            if reply.outcome == "gone":
                self._reopen()
            if last:
                raise BatchTimeout(
                    task=self._store.task,
                    wanted=wanted.least,
                    available=reply.amount,
                    waited_s=wait.waited_s,
                    blocked=reply.blocked,
                    expired=expired,
                    others=reply.others,
                )
            if reply.outcome == "short":
                wait.tell(
                    f"task {self._store.task!r}, consumer group {self._group!r}: "
                    f"{reply.amount} of {count} groups are waiting, {expired} were too stale, and "
                    f"{reply.blocked} producers wait for room"
                )
                self._store.wait_for_wake(wait.slice_s(), self._waiter(slot))

    def _acknowledgement(self, lease: Lease) -> Ending | None:
        """Return how a lease is acknowledged; None when nothing of it is left."""
        holder = lease.holder
        if not isinstance(holder, _Slot) or not lease.ids:
            return None
        return Ending(
            self._name_of(holder.number), holder.token, "ack", lease.ids, samples=lease.samples
        )

    def _conclude(self, ack: Lease, reply: TakeReply, slot: int, token: str) -> None:
        """Close the lease that a take has acknowledged; if it was lost, undo the take."""
        if isinstance(ack.holder, _Slot) and ack.ids:
            self.free(ack.holder.number)
            if not reply.held and reply.outcome == "taken":
                self.finish(slot, token, "release", [seq for seq, _ in reply.entries], ends=True)
            ack.conclude(held=reply.held)

    def _name_of(self, slot: int) -> str:
        return f"{self.name}/{slot}"

    def finish(
        self,
        slot: int,
        token: str,
        outcome: Outcome,
        ids: Sequence[int],
        *,
        reason: str = "",
        samples: int = 0,
        ends: bool,
    ) -> bool:
        """End groups of a lease; False when they are another consumer's by now."""
        ending = Ending(self._name_of(slot), token, outcome, tuple(ids), reason, samples, ends)
        return self._scripts.finish(self._group, self.name, ending)

    def abandon(self, slot: _Slot, ids: tuple[int, ...]) -> None:
        """Leave groups to the next heartbeat; never blocks."""
        self._abandoned.append((slot, ids))

    def abandon_ahead(self, ahead: Ahead) -> None:
        """Leave a take that was sent to the heartbeat's thread, now; never blocks."""
        self._aheads.append(ahead)
        if self._heartbeat is not None and self._pid == os.getpid():
            self._heartbeat.nudge()

    def free(self, slot: int) -> None:
        """Let another lease use the slot."""
        with self._lock:
            self._slots.discard(slot)

    def _start_heartbeat(self) -> None:
        with self._lock:
            if self._heartbeat is None:
                self._heartbeat = Heartbeat(self.beat, self._lease_ms / 3000, "heartbeat")

    def beat(self) -> None:
        """Say that this consumer lives, and give back what was dropped without being ended."""
        known, taken_over = self._scripts.heartbeat(self._group, self.name, self._lease_ms)
        if not known and self._slots:
            _log.warning("task %r: the heartbeat came too late", self._store.task)
        if taken_over:
            _log.warning(
                "task %r: took %d groups over from dead consumers", self._store.task, taken_over
            )
        self._settle_aheads()
        while self._abandoned:
            slot, ids = self._abandoned.popleft()
            _log.warning(
                "task %r: a lease on %d groups was dropped without ack, release or reject; "
                "its groups go back",
                self._store.task,
                len(ids),
            )
            try:
                slot.finish("release", ids, ends=True)
            except StoreError:
                self._abandoned.appendleft((slot, ids))
                raise

    def _settle_aheads(self) -> None:
        """Give back what takes have leased that nobody waits for any more."""
        while self._aheads:
            ahead = self._aheads.popleft()
            try:
                reply = self.receive(ahead, timeout=SETTLE_S)
                if reply is not None:
                    self.give_back(ahead, reply)
            except (LeaseLost, StoreError) as error:
                _log.warning(
                    "task %r: what a loop over leases held goes back later: %s",
                    self._store.task,
                    error,
                )
