"""`Collector`: takes full batches from several partitions together, and waits for them."""

from __future__ import annotations

import itertools
import logging
import random
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from redrb.connection.deadline import GRACE_S, SHORT_OUTAGE_S, Deadline, here
from redrb.connection.request import Request
from redrb.errors import BatchTimeout, ConfigError, StoreError, StoreUnavailable
from redrb.stream.partitions.partition import Partition
from redrb.stream.partitions.turn import Turn
from redrb.stream.take.calls import Look, LookReply, Search, TakeReply, TakeRequest
from redrb.stream.take.endings import end_parts
from redrb.stream.take.in_flight import InFlightTake
from redrb.stream.take.lease import Lease
from redrb.stream.take.partition_lease import PartitionLease
from redrb.stream.take.taker import fates_seen_by
from redrb.stream.task.queries import no_query
from redrb.stream.task.reach import Reach
from redrb.stream.task.store import QUEUE_TTL_MS
from redrb.stream.task.wakes import wait_for_any
from redrb.words import counted

_log = logging.getLogger("redrb")


@dataclass(slots=True)
class Collection:
    """An unfinished batch: its parts are leased, and released again if it stays incomplete.

    Attributes:
        waiter: Name of the take in the queues of the partitions.
        leases: Leased groups of partitions, in the order in which they were leased.
        short: Partition -> its last reply, if it had too few groups.
        left: Partition -> groups that wait there still, as far as is known.
        searches: Partition -> how far it has looked for groups that match a query.
        expired: Groups that turned out to be too stale.
        queued: Whether the take may be in queues.
    """

    request: TakeRequest
    waiter: str = field(default_factory=lambda: f"take-{uuid.uuid4().hex}")
    leases: list[Lease | None] = field(default_factory=list)
    short: dict[int, TakeReply] = field(default_factory=dict)
    left: dict[int, int] = field(default_factory=dict)
    searches: dict[int, Search | None] = field(default_factory=dict)
    expired: int = 0
    queued: bool = False

    def __len__(self) -> int:
        """Return the number of groups that are leased."""
        return sum(map(len, self.parts))

    @property
    def parts(self) -> list[PartitionLease]:
        """The parts of the batch."""
        return [part for lease in self.leases if lease is not None for part in lease.parts]

    @property
    def missing(self) -> int:
        """Groups that the full batch lacks."""
        return self.request.count - len(self)

    def note(self, partition: int, reply: TakeReply) -> None:
        """Note what a partition has replied."""
        self.expired += reply.expired
        self.left[partition] = reply.left
        if reply.outcome == "short":
            self.short[partition] = reply
        else:
            self.short.pop(partition, None)

    def release(self) -> None:
        """Requeue the groups of an incomplete batch."""
        parts = self.parts
        self.leases.clear()
        with Deadline(SHORT_OUTAGE_S):
            errors = end_parts("release", [(part, part.ids) for part in parts])
        for part in parts:
            if part in errors:
                _log.warning(
                    "task %r, partition %d: a part of a batch is requeued later: %s",
                    part.task,
                    part.number,
                    errors[part],
                )
                part.abandon()

    def fates(self, leased_here: Sequence[int]) -> Mapping[str, int]:
        """Return where the groups of the task are; empty if a partition has groups still.

        Args:
            leased_here: Groups that the consumer leases in each partition, those of this take
                included: they count as available.
        """
        if len(self.short) < len(leased_here):
            return {}
        total: Counter[str] = Counter()
        for number, reply in self.short.items():
            leased = leased_here[number]
            total.update(fates_seen_by(reply.fates, reply.amount, leased_here=leased))
        if total:
            total["available"] += len(self)
            total["leased_here"] -= len(self)
        for name in ("stale_version", "version"):  # the newest, no sum
            known = [reply.fates[name] for reply in self.short.values() if name in reply.fates]
            if known:
                total[name] = max(known)
        return total


def spread(groups: int, partitions: list[int]) -> dict[int, int]:
    """Divide a number of groups among partitions, evenly; returns how many to take of each."""
    whole, more = divmod(groups, len(partitions)) if partitions else (0, 0)
    shares = {number: whole + (place < more) for place, number in enumerate(partitions)}
    return {number: share for number, share in shares.items() if share}


def fill(groups: int, left: Mapping[int, int]) -> dict[int, int]:
    """Divide a number of groups among partitions; as many as there are are taken of the fullest."""
    shares: dict[int, int] = {}
    for number in sorted(left, key=lambda one: -left[one]):
        share = min(groups, left[number])
        if share > 0:
            shares[number] = share
            groups -= share
    return shares


LEAST_SHARE = 16
"""Groups that are worth a request: a smaller batch is taken from fewer partitions, if it can be."""


class Collector:
    """Takes batches of a task with partitions for one consumer; safe among threads.

    A take looks at some partitions, in rotation, and then at all others. If that is not enough, it
    asks for its turn: only one take of a consumer group waits for groups at a time, so two takes
    never hold groups that the other one needs. Takes that wait for their turn hold no groups. The
    take whose turn it is queues in all partitions.

    Partitions that cannot be reached are left out as long as others can be.
    """

    def __init__(self, partitions: Sequence[Partition], task: str, reach: Reach) -> None:
        self._partitions = partitions
        self._reach = reach
        self._task = task
        first, *_ = random.sample(range(len(partitions)), 1)  # not the same one in all processes
        self._firsts = itertools.count(first)

    def take(self, request: TakeRequest, ack: Lease | None = None) -> Lease:
        """Lease all groups of a request, or none; raises as `Taker.take` does."""
        self._acknowledge(ack)
        collection = Collection(request)
        try:
            self._sweep(collection)
            if collection.missing and not (here().over and self._enough(collection)):
                with self._partitions[0].worker.waiting("batch"):
                    self._wait(collection)
            return self.lease(collection)
        except BaseException:
            collection.release()
            raise
        finally:
            if collection.queued:
                self._leave(collection)

    def send(self, request: TakeRequest, ack: Lease | None = None) -> InFlightCollection:
        """Send takes to some partitions; their replies are read later."""
        self._acknowledge(ack)
        collection = Collection(request)
        shares = self._first_shares(collection)
        take = InFlightCollection(self, collection, [])
        try:
            for number, share in shares.items():
                take.sent.append((number, self._send(collection, number, share)))
            return take
        except BaseException:
            take.abandon()
            raise

    def receive(
        self,
        collection: Collection,
        sent: list[tuple[int, InFlightTake]],
    ) -> bool:
        """Read the replies to takes that were sent; returns whether the batch is full.

        What it lacks is taken from the other partitions; an incomplete batch is released.
        """
        try:
            self._receive(collection, sent)
            self._sweep(collection)
        except BaseException:
            _abandon(sent)
            collection.release()
            raise
        if collection.missing:
            collection.release()
        return not collection.missing

    def is_fresh(self, lease: Lease) -> bool:
        """Return whether a batch that was taken ahead may be handed over; see `Taker.is_fresh`.

        Each partition compares its groups with the version that it knows.
        """
        takers = {partition.consumer: partition.taker for partition in self._partitions}
        for part in lease.parts:
            taker = takers.get(getattr(part.holder, "consumer", None))  # type: ignore[arg-type]
            if taker is not None and not taker.is_fresh(Lease([part])):
                if lease:
                    lease.release()
                return False
        return True

    def _leave(self, collection: Collection) -> None:
        """Leave the queues of all partitions, so that others need not wait until places expire."""
        try:
            with Deadline(SHORT_OUTAGE_S):
                self._look(collection, need=1, ttl_ms=0)
        except StoreError as error:
            _log.warning(
                "task %r: a take that is over keeps its places in queues for %.0f s: %s",
                self._task,
                QUEUE_TTL_MS / 1000,
                error,
            )

    def _acknowledge(self, ack: Lease | None) -> None:
        if not ack:
            return
        holders = [partition.consumer for partition in self._partitions]
        if any(getattr(part.holder, "consumer", None) not in holders for part in ack.parts):
            raise ConfigError("take(ack=...) acknowledges leases of the same stream object only.")
        ack.ack()

    def _enough(self, collection: Collection) -> bool:
        return len(collection) >= collection.request.least

    def lease(self, collection: Collection) -> Lease:
        """Return the lease on a batch."""
        names = [partition.incarnation for partition in self._partitions]
        for part in collection.parts:
            names[part.number] = part.incarnation
        return Lease(collection.parts, ".".join(names))

    # what is there

    def _first_shares(self, collection: Collection) -> dict[int, int]:
        """Return the shares of the partitions that are asked first."""
        near = self._reach.near()
        some = min(len(near), max(1, collection.missing // LEAST_SHARE))
        first = next(self._firsts) * some % len(near)
        places = [(first + place) % len(near) for place in range(some)]
        return spread(collection.missing, [near[place] for place in places])

    def _sweep(self, collection: Collection) -> None:
        """Take what is there: of some partitions, of the others, then of all that have more."""
        if not collection.left:
            self._ask(collection, self._first_shares(collection))
        while unasked := [one for one in self._reach.near() if one not in collection.left]:
            shares = spread(collection.missing, unasked)
            if not shares:
                break
            self._ask(collection, shares)
            if here().pages_over:
                break
        while collection.missing:
            shares = fill(collection.missing, collection.left)
            if not shares:
                break
            self._ask(collection, shares)
        if collection.missing and self._reach.all_away:
            collection.left.clear()
            self._ask(collection, self._first_shares(collection), patient=True)
            self._sweep(collection)

    def _ask(
        self,
        collection: Collection,
        shares: Mapping[int, int],
        *,
        patient: bool = False,
    ) -> None:
        """Take up to a share of each partition; all are asked before the first reply is read."""
        sent: list[tuple[int, InFlightTake]] = []
        try:
            with Deadline(at_most=GRACE_S):  # it may have to connect
                for number, share in shares.items():
                    sent.append((number, self._send(collection, number, share)))
            self._receive(collection, sent, patient=patient)
        except BaseException:
            _abandon(sent)
            raise

    def _send(self, collection: Collection, number: int, share: int) -> InFlightTake:
        whole = collection.request
        request = TakeRequest(share, 1, whole.status, whole.where)
        search = collection.searches.pop(number, None)
        taker = self._partitions[number].taker
        return taker.send(request, waiter=collection.waiter, search=search)

    def _receive(
        self,
        collection: Collection,
        sent: list[tuple[int, InFlightTake]],
        *,
        patient: bool = False,
    ) -> None:
        """Read the replies to takes, and note the parts; the caller abandons them after an error.

        Args:
            patient: Wait for lost partitions.
        """
        short = Deadline(repeat_s=None if patient else SHORT_OUTAGE_S)
        for number, take in reversed(sent):
            collection.left[number] = 0
            if not patient and number in self._reach.away:  # found by another reply
                take.abandon()
                continue
            try:
                with short:
                    full = take.receive()
            except StoreUnavailable as error:
                self._reach.lose(number, error)
                if patient:
                    raise
                continue
            self._reach.find(number)
            reply = take.seen
            if reply is None:
                continue
            if reply.outcome in ("gone", "more"):
                del collection.left[number]  # it is asked again
                collection.searches[number] = reply.search
            else:
                collection.note(number, reply)
            self._partitions[number].taker.accept(collection.request, reply)
            if full:  # without a name, which an interrupt on the next line would leave to its error
                collection.leases.append(take.lease())

    # waiting

    def _wait(self, collection: Collection) -> None:
        """Wait for the turn, and then for groups."""
        outage = None
        try:
            self._wait_in_turn(collection)
        except StoreUnavailable as error:  # the node that keeps the turns: take what is there
            outage = error
            self._sweep_again(collection)
        if collection.missing and not self._enough(collection):
            raise outage or self._timeout(collection)

    def _wait_in_turn(self, collection: Collection) -> None:
        home = self._partitions[0]
        turn = Turn(home.store, home.consumer.group)
        try:
            if self._await_turn(collection, turn):
                self._await_groups(collection, turn)
            if collection.missing:  # the time is up
                self._sweep_again(collection)
        finally:
            turn.end()

    def _await_turn(self, collection: Collection, turn: Turn) -> bool:
        """Wait until it is this take's turn; False when the time is up before."""
        deadline = here()
        while not deadline.over:
            if turn.ask():
                return True
            collection.release()  # the take whose turn it is may need these groups
            deadline.log(f"task {self._task!r}: a take waits for the take before it")
            turn.wait()
        return False

    def _await_groups(self, collection: Collection, turn: Turn) -> None:
        """Take groups as they come, until the batch is full or the time is up."""
        count, deadline = len(self._partitions), here()
        free = dict.fromkeys(range(count), 0)
        while collection.missing and not deadline.over:
            # The take is woken as soon as one partition has its part of the groups that are missing
            # in all: while fewer have come to each, fewer have come in all than are missing.
            share = -(-(collection.missing - sum(free.values())) // count)
            needs = {number: free[number] + share for number in free}
            free = self._look(collection, need=needs, ttl_ms=QUEUE_TTL_MS)
            if sum(free.values()) >= collection.missing:
                self._ask(collection, fill(collection.missing, free))
                free = dict.fromkeys(range(count), 0)
                continue
            if any(free[number] >= needs[number] for number in free):
                continue
            text = f"task {self._task!r}: {len(collection) + sum(free.values())} of "
            text += f"{counted(collection.request.count, 'group', 'are')} waiting in "
            namespace = self._partitions[0].store.keys.namespace
            deadline.log(f"{text}{count} partitions", namespace)
            stores = [self._partitions[number].store for number in self._reach.near()]
            wait_for_any([(store.client, store.keys.wake(collection.waiter)) for store in stores])
            if not self._await_turn(collection, turn):
                return  # this process stood still, and another take has had the turn since

    def _sweep_again(self, collection: Collection) -> None:
        collection.left.clear()
        self._sweep(collection)

    def _look(
        self, collection: Collection, *, need: int | Mapping[int, int], ttl_ms: int
    ) -> dict[int, int]:
        """Return how many groups are free in each partition, and queue in each; 0: leave."""
        collection.queued = ttl_ms > 0
        free = dict.fromkeys(range(len(self._partitions)), 0)
        searches: dict[int, Search | None] = {}

        def request(number: int) -> Request[LookReply]:
            partition = self._partitions[number]
            least = need if isinstance(need, int) else need[number]
            asked = msgspec.structs.replace(collection.request, least=least)
            revision = partition.task.description.revision
            group, search = partition.consumer.group, searches.get(number)
            look = Look(group, collection.waiter, asked, ttl_ms, revision, search)
            return partition.store.request(look)

        todo = list(free)
        while todo and not (collection.queued and here().pages_over):
            replies = self._reach.replies(request, todo)
            todo = [number for number, reply in replies.items() if reply.outcome != "found"]
            for number, reply in replies.items():
                searches[number] = reply.search
                if reply.outcome == "drawn":
                    raise no_query(self._task)
                if reply.outcome == "found":
                    free[number] = reply.free
                elif reply.outcome == "gone":
                    self._partitions[number].task.reopen(refused_here=True)
        return free

    def _timeout(self, collection: Collection) -> BatchTimeout:
        """Return the error of a take whose time is up; its groups are released."""
        available = len(collection)
        fates = collection.fates([partition.consumer.held for partition in self._partitions])
        replies = collection.short.values()
        return BatchTimeout(
            task=self._task,
            namespace=self._partitions[0].store.keys.namespace,
            wanted=collection.request.least,
            available=available,
            waited_s=here().waited_s,
            blocked=sum(reply.blocked for reply in replies),
            expired=collection.expired,
            others=sum(reply.others for reply in replies),
            fates=fates,
            unfinished=any(number not in collection.left for number in self._reach.near()),
            similar=() if fates.get("put_ever", 1) else self._partitions[0].task.similar(),
            missing_partitions=self._reach.away,
        )


def _abandon(sent: list[tuple[int, InFlightTake]]) -> None:
    """Let the heartbeat threads release what was sent and has no lease; never blocks."""
    for _, take in sent:
        take.abandon()


@dataclass(eq=False, repr=False)
class InFlightCollection:
    """Takes of some partitions that were sent and whose replies are read later."""

    _collector: Collector
    _collection: Collection
    sent: list[tuple[int, InFlightTake]]

    def receive(self) -> bool:
        """Read the replies; returns whether the batch is full and leased."""
        return self._collector.receive(self._collection, self.sent)

    def lease(self) -> Lease | None:
        """Return the lease on the batch received."""
        return self._collector.lease(self._collection)

    def abandon(self) -> None:
        """Let the heartbeat threads read the replies and release the groups; never blocks."""
        for part in self._collection.parts:
            part.abandon()
        _abandon(self.sent)
