"""`Consumer`: one member of a consumer group, with its slots for leases and its heartbeat."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from redrb.connection.client import Request
from redrb.experience import Status
from redrb.forks import in_child
from redrb.lua.pages import PAGES
from redrb.processes import has_ended
from redrb.stream.heartbeat import Heartbeat, Silences, do_each, period_s
from redrb.stream.take.calls import Beat, Drop, Finish, Leave, Outcome, Pulse, Recheck
from redrb.stream.take.cause import NO_CAUSE, Cause
from redrb.stream.take.rollout_reading import GroupReader
from redrb.stream.task.task import Task
from redrb.stream.worker import Worker
from redrb.words import counted

T = TypeVar("T")

_DROP = "Drop the result of training on them and take again."

_log = logging.getLogger("redrb")


@dataclass(frozen=True, slots=True)
class Slot:
    """The holder of one lease: a numbered place of a consumer, and the token of one lease in it.

    Attributes:
        owner: Its name in Redis. A forked process has a copy of the slot, and another name.
        token: Number of the lease in it, as text.
        since: When it was occupied (monotonic).
    """

    consumer: Consumer
    owner: str
    number: int
    token: str
    since: float

    @property
    def lease(self) -> tuple[str, int, str]:
        """What names the lease in it, of all leases of all processes."""
        return self.owner, self.number, self.token

    @property
    def name(self) -> str:
        """Name in Redis' pending list."""
        return f"{self.owner}/{self.number}"

    @property
    def waiter(self) -> str:
        """Name in the queue of takes."""
        return f"{self.owner}.{self.number}"

    @property
    def is_copy(self) -> bool:
        """Whether this is a forked process's copy: the lease belongs to the parent."""
        return self.owner != self.consumer.name

    @property
    def loss(self) -> str:
        """Why the lease is lost, as far as this process knows, and what to do."""
        silent_s, lease_ms = self.consumer.silences.longest_s(self.since), self.consumer.lease_ms
        if silent_s * 1000 >= lease_ms:
            fixed = "split such calls: the leases of claimed rows have no setting"
            remedy = fixed if self.consumer.claims_rows else "give a larger lease_ms"
            return (
                f"the heartbeat of this process was silent for {silent_s:.1f} s, longer than "
                f"lease_ms={lease_ms}, and others got the groups. A call that holds Python's lock "
                "(GIL) for so long stops the heartbeat, such as graph capture or a C extension; so "
                "does a stopped process, or a Redis that is away. If that is usual, "
                f"{remedy}. {_DROP}"
            )
        return (
            f"the heartbeat of this process was never silent for longer than {silent_s:.1f} s "
            f"(lease_ms={lease_ms}). Another client acknowledged some of the groups for a "
            "checkpoint or removed the consumer or its group, or the task was cleared or deleted, "
            f"or Redis has lost its data. {_DROP}"
        )

    def ending(
        self,
        outcome: Outcome,
        ids: Sequence[int],
        *,
        reason: Cause = NO_CAUSE,
        samples: int = 0,
        ends: bool = True,
    ) -> Finish:
        """Return the call that ends groups of this lease."""
        lease = (self.consumer.group, self.owner, self.name, self.token)
        return Finish(*lease, outcome, list(map(str, ids)), reason, samples, ends)

    def end_request(
        self, outcome: Outcome, ids: Sequence[int], *, reason: Cause, samples: int, ends: bool
    ) -> Request[str]:
        """Return the request that ends groups, and frees the slot with the last ones."""

        def note(result: str) -> str:
            if ends or result == "lost":
                self.free()
            else:
                self.count(-len(ids))
            return self.loss if result == "lost" else ""

        ending = self.ending(outcome, ids, reason=reason, samples=samples, ends=ends)
        return self.consumer.end_request(ending, note)

    def release(self, ids: Sequence[int]) -> None:
        """Requeue all groups of this lease in pages, and free the slot."""
        self.requeue(ids)
        self.free()

    def requeue(self, ids: Sequence[int]) -> None:
        """Requeue all groups of this lease in pages; the slot stays occupied."""
        most = PAGES["ended"]
        for first in range(0, max(len(ids), 1), most):
            page, ends = ids[first : first + most], first + most >= len(ids)
            ending = self.ending("release", page, ends=ends)
            self.consumer.end_request(ending, str).result()

    def count(self, groups: int) -> None:
        """Note groups that the slot leases further; negative: no longer."""
        self.consumer.count(self, groups)

    def abandon(self, ids: tuple[int, ...]) -> None:
        """Leave groups to the next heartbeat, which releases them; never blocks."""
        if not self.is_copy:
            self.consumer.abandoned.append((self, ids))

    def give_up(self) -> None:
        """Free the slot of a take that may have leased groups, although its reply was lost.

        The heartbeat thread requeues them; never blocks.
        """
        if not self.is_copy:
            self.consumer.given_up.append(self)
            self.consumer.nudge()
            self.free()

    def free(self) -> None:
        """Let another lease use the slot; repeated, it frees nothing that a later lease uses."""
        self.consumer.free(self)


class Consumer:
    """One member of a consumer group; safe among threads."""

    def __init__(
        self,
        task: Task,
        group: str,
        lease_ms: int,
        worker: Worker,
        reader: GroupReader | None = None,
        finish_due: Callable[[float], bool] | None = None,
        end_makers: Callable[[Sequence[str]], object] | None = None,
    ) -> None:
        """Make a consumer; its heartbeat begins with the first take.

        Args:
            lease_ms: Silence of the heartbeat after which other consumers take its leases over.
            finish_due: Puts or removes groups in parts that are due, for so many seconds; returns
                whether there are more. The heartbeat thread calls it.
            end_makers: Takes rights back from those of some makers that have died.
        """
        self._task = task
        self._end_makers = end_makers
        self._finish_due = finish_due
        self.reader = reader
        self.group = group
        self.lease_ms, self.claims_rows = lease_ms, ":" in task.name  # of a table: keys.py
        self._slice_s = period_s(lease_ms) / 2  # the next beat comes in time
        self.worker = worker
        self._begin()
        in_child(self._begin)

    def _begin(self) -> None:
        """Become a consumer that Redis does not know yet: at first, and in a forked process."""
        self.name = self.worker.name
        self._tokens = itertools.count(1)
        self.silences, self._silent_s = Silences(), 0.0
        self._leased: dict[tuple[str, int, str], int] = {}  # lease -> groups; none of a parent's
        self.abandoned: deque[tuple[Slot, tuple[int, ...]]] = deque()
        self.given_up: deque[Slot] = deque()
        self._taken_over = 0  # groups, by beats that follow each other at once
        self._lock = threading.Lock()
        self._heartbeat: Heartbeat | None = None
        self._may_lease = False

    def attend(self) -> None:
        """Start the heartbeat, which also takes over leases of dead consumers."""
        self.worker.takes()
        with self._lock:
            if self._heartbeat is None:
                self._heartbeat = Heartbeat(
                    self.beat, self.lease_ms, "heartbeat", self.worker.end.announce
                )
                self._may_lease = True

    def occupy(self) -> Slot:
        """Return a slot that no lease of this consumer uses, with a new token."""
        self.attend()
        with self._lock:
            used = {number for _, number, _ in self._leased}
            number = next(free for free in itertools.count() if free not in used)
            slot = Slot(self, self.name, number, str(next(self._tokens)), time.monotonic())
            self._leased[slot.lease] = 0
        return slot

    def free(self, slot: Slot) -> None:
        """Let another lease use a slot."""
        with self._lock:
            self._leased.pop(slot.lease, None)

    def count(self, slot: Slot, groups: int) -> None:
        """Note groups that a slot leases further; negative: no longer."""
        with self._lock:
            if slot.lease in self._leased:
                self._leased[slot.lease] += groups

    @property
    def held(self) -> int:
        """Groups that this consumer leases, as far as it knows."""
        with self._lock:
            return sum(self._leased.values())

    def end_request(self, ending: Finish, note: Callable[[str], T]) -> Request[T]:
        """Return the request that ends groups of a lease.

        `note` is given its result, "ok", or "lost" when another consumer has taken the lease over.
        """

        def read(result: str) -> T:
            if result == "ok" and ending.outcome == "ack":
                self.worker.count(len(ending.seqs), ending.samples)
            return note(result)

        store = self._task.store
        return ending.as_request(store.client, store.script_keys, read)

    def recheck(self, slot: Slot, status: Status, ids: Sequence[int]) -> bool:
        """Return whether a lease is within the bound of staleness; else it is over."""
        look = Recheck(self.group, slot.name, slot.token, status, list(map(str, ids)))
        *_, reply = self._task.store.pages(look)
        if not reply.fresh:
            slot.free()
        return reply.fresh

    def nudge(self) -> None:
        """Let the heartbeat thread beat now; may be called from anywhere."""
        if self._heartbeat is not None:
            self._heartbeat.nudge()

    def beat(self) -> None:
        """Renew this consumer's deadline, and release leases that were dropped."""
        name = self._task.name
        pulse = self._renew()
        if pulse.outcome == "anew":
            self._task.reopen()
            pulse = self._renew()
        elif pulse.outcome == "lost" and self._leased:
            _log.warning(
                "task %r: the heartbeat came too late, after %.1f s; lease_ms=%d",
                name,
                self._silent_s,
                self.lease_ms,
            )
        self._taken_over += pulse.taken_over
        if pulse.more:
            self.nudge()
        elif self._taken_over:
            taken = counted(self._taken_over, "group")
            _log.warning("task %r: took %s over from dead consumers", name, taken)
            self._taken_over = 0
        self._end_dead(pulse)
        self._requeue_given_up()
        do_each(self.abandoned, self._release_abandoned)
        if pulse.due and self._finish_due is not None and self._finish_due(self._slice_s):
            self.nudge()

    def _end_dead(self, pulse: Pulse) -> None:
        """Take over at once from consumers and makers that are known to have died."""
        for name in filter(has_ended, pulse.consumers):
            if groups := self.leave(name, died=True):
                _log.warning(
                    "task %r: the process of consumer %s has died: took over %s",
                    self._task.name,
                    name,
                    counted(groups, "group"),
                )
        if pulse.makers and self._end_makers is not None:
            self._end_makers(pulse.makers)

    def _requeue_given_up(self) -> None:
        def requeue(slot: Slot) -> None:
            drop = Drop(self.group, slot.name, slot.token)
            returned = sum(page.found for page in self._task.store.pages(drop))
            if returned:
                _log.warning(
                    "task %r: requeued %s of a take whose reply was lost",
                    self._task.name,
                    counted(returned, "group"),
                )

        do_each(self.given_up, requeue)

    def _release_abandoned(self, lease: tuple[Slot, tuple[int, ...]]) -> None:
        slot, ids = lease
        _log.warning(
            "task %r: a lease on %s was dropped without ack, release or reject, and is requeued",
            self._task.name,
            counted(len(ids), "group"),
        )
        slot.release(ids)

    def _renew(self) -> Pulse:
        incarnation = self._task.description.incarnation
        beat = Beat(self.group, self.name, self.lease_ms, incarnation)
        pulse = self._task.store.call(beat, self.worker.announcement())
        self._silent_s = self.silences.end()
        return pulse

    def close(self, *, requeue: bool = True) -> None:
        """Stop the heartbeat and requeue the groups that are still leased, unharmed.

        If Redis cannot be reached, another call goes on.

        Args:
            requeue: False: the groups wait until the lease is over, and count a failed delivery.
        """
        with self._lock:
            heartbeat, self._heartbeat = self._heartbeat, None
        if heartbeat is not None:
            heartbeat.stop()
        if self._may_lease and requeue:
            self.leave(self.name)
            self._may_lease = False

    def leave(self, name: str, *, died: bool = False) -> int:
        """Requeue what a consumer of this group leases; returns the number of groups.

        Args:
            died: Whether it is known to have died, so that its deliveries have failed.
        """
        return sum(page.found for page in self._task.store.pages(Leave(self.group, name, died)))
