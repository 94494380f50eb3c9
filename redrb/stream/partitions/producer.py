"""`PartitionedProducer`: stores groups exactly once, each put in the least full partition."""

from __future__ import annotations

import logging
import random
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from redrb.connection.deadline import SHORT_OUTAGE_S, Deadline, here
from redrb.connection.request import Request
from redrb.errors import ConfigError, StoreError, StoreFull, StoreUnavailable
from redrb.stream.partitions.partition import Partition
from redrb.stream.put.batch import PutBatch
from redrb.stream.put.calls import PutReply, RoomReply
from redrb.stream.put.fitting import reindexed
from redrb.stream.put.pending import CHUNK_GROUPS, PendingPut
from redrb.stream.put.room import OnFull
from redrb.stream.task.entries import Numbering
from redrb.stream.task.reach import Reach
from redrb.stream.task.store import QUEUE_TTL_MS
from redrb.stream.task.wakes import wait_for_any

_log = logging.getLogger("redrb")


class RoomPlaces:
    """Queues for room in all partitions at once, for one put.

    In each partition the put waits as a put into that partition alone does, with a name of its own,
    and the room that it is woken for is reserved for it. So the put that has waited longest gets
    the room that is made in any partition. It leaves the other queues when it is stored, and the
    room that was reserved there goes to the next puts.
    """

    def __init__(self, task: str, partitions: Sequence[Partition], reach: Reach) -> None:
        self._reach = reach
        self._task = task
        self._partitions = partitions
        self._puts: dict[int, PendingPut] = {}

    def look(self, fitted: Callable[[int], PutBatch]) -> dict[int, int]:
        """Queue in all partitions, or renew the places.

        Args:
            fitted: Returns the groups to put, as a partition needs them.

        Returns:
            How many of the groups each partition has room for now.
        """
        for number, partition in enumerate(self._partitions):
            batch = fitted(number)
            if number in self._puts:
                self._puts[number].batch = batch
            else:
                self._puts[number] = partition.producer.new(batch)
        replies = self._ask(QUEUE_TTL_MS)
        return {number: reply.granted for number, reply in replies.items()}

    def use(self, number: int) -> PendingPut:
        """Return the put into one partition, which ends the place there."""
        return self._puts.pop(number)

    def wait(self) -> None:
        """Block until a partition has room for this put."""
        places = [
            (self._partitions[number].store, self._puts[number].identity.name)
            for number in self._reach.near()
            if number in self._puts
        ]
        wait_for_any([(store.client, store.keys.wake(name)) for store, name in places])

    def leave(self) -> None:
        """Leave the queues, so that others need not wait until the places expire."""
        try:
            with Deadline(SHORT_OUTAGE_S):
                self._ask(0)
        except StoreError as error:
            _log.warning(
                "task %r: a put that is over keeps its places in queues for room for %.0f s: %s",
                self._task,
                QUEUE_TTL_MS / 1000,
                error,
            )
        finally:
            for number, put in self._puts.items():
                self._partitions[number].producer.abandon(put)
            self._puts.clear()

    def _ask(self, ttl_ms: int) -> dict[int, RoomReply]:
        """Ask all partitions that can be reached before the first reply is read."""

        def request(number: int) -> Request[RoomReply]:
            return self._partitions[number].producer.ask_room(self._puts[number], ttl_ms=ttl_ms)

        return self._reach.replies(request, self._puts)


PUTS_A_LOOK = 4
"""One put of so many a partition goes to the partition that was not put to for the longest time.

Its reply says how full that partition is. Without this a partition that was full once, and that
takers have emptied since, would not be noticed before the others are as full.
"""


class LeastFull:
    """Knows how full partitions are, from the replies to puts; safe among threads.

    No request is sent for it: a put's reply has the number of groups in its partition, and groups
    that are on their way are added here.
    """

    def __init__(self, partitions: int) -> None:
        self._backlogs = [0] * partitions
        # in random order, so that many makers do not all begin with the same partition
        self._last_puts = random.sample(range(-partitions, 0), partitions)
        self._puts = 0
        self._lock = threading.Lock()

    def choose(self, groups: int, but: Collection[int] = ()) -> int:
        """Return the partition for a put of so many groups; one of `but` only if there is no other.

        Among partitions that are equally full it is the one that was not put to for the longest
        time.
        """
        every = range(len(self._backlogs))
        with self._lock:
            open_to = [number for number in every if number not in but] or list(every)
            self._puts += 1
            if self._puts % (PUTS_A_LOOK * len(every)):
                chosen = min(open_to, key=lambda one: (self._backlogs[one], self._last_puts[one]))
            else:
                chosen = min(open_to, key=self._last_puts.__getitem__)
            self._last_puts[chosen] = self._puts
            self._backlogs[chosen] += groups
        return chosen

    def note(self, partition: int, backlog: int) -> None:
        """Note how many groups a partition holds."""
        with self._lock:
            self._backlogs[partition] = backlog


@dataclass(slots=True)
class SpreadPut:
    """An unfinished put of groups that may go to several partitions.

    Attributes:
        pieces: Groups that were not sent to a partition yet, in parts of at most 32.
        stored: Ids of the groups whose partition has confirmed them, from the first.
        current: The partition that gets the next groups, and the put into it.
        refused: Partitions that are not tried again before the put has waited; those that had
            room, as they said, and refused it all the same, or all where puts do not wait.
        refusal: The error of the last partition that had no room.
        places: Its places in the queues for room, once it has waited.
    """

    batch: PutBatch
    numbering: Numbering
    pieces: deque[PutBatch] = field(default_factory=deque)
    stored: list[int] = field(default_factory=list)
    current: tuple[int, PendingPut] | None = None
    refused: set[int] = field(default_factory=set)
    refusal: StoreFull | None = None
    places: RoomPlaces | None = None

    def __post_init__(self) -> None:
        total = len(self.batch.groups)
        for first in range(0, max(total, 1), CHUNK_GROUPS):  # it may have no groups, only counts
            self.pieces.append(self.batch.part(first, min(first + CHUNK_GROUPS, total)))

    @property
    def ids(self) -> Sequence[int]:
        """Ids of the groups that are certainly stored, from the first."""
        if self.current is None:
            return self.stored
        number, pending = self.current
        return [*self.stored, *self.numbering.ids(number, pending.ids)]

    @property
    def sent(self) -> Request[PutReply] | None:
        """The request that is under way."""
        return None if self.current is None else self.current[1].sent

    @property
    def over(self) -> bool:
        """Whether all groups are stored."""
        return self.current is None and not self.pieces


class PartitionedProducer:
    """Puts encoded groups into the partitions of a task; safe among threads.

    All groups of a put go to one partition, or, of a large put, up to 32 at a time. A put that
    finds no room queues in all partitions at once, and goes to the first one that has room; with
    another `on_full` it tries one partition after the other. It moves only if no attempt can still
    arrive, so that no group is stored twice.
    """

    def __init__(
        self, task: str, partitions: Sequence[Partition], on_full: OnFull, reach: Reach
    ) -> None:
        self._reach = reach
        self._task = task
        self._partitions = partitions
        self._numbering = partitions[0].store.numbering
        self._on_full = on_full
        self._least_full = LeastFull(len(partitions))

    def put(self, batch: PutBatch) -> tuple[int, ...]:
        """Store groups; returns their ids in order. Raises as `Producer.put` does."""
        put = SpreadPut(batch, self._numbering)
        try:
            return self.finish(put)
        finally:
            self.abandon(put)

    def send(self, batch: PutBatch) -> SpreadPut:
        """Send groups without waiting for the reply; `finish` must follow."""
        put = SpreadPut(batch, self._numbering)
        if len(put.pieces) == 1:
            self._begin(put)
        return put

    def finish(self, put: SpreadPut) -> tuple[int, ...]:
        """Wait until all groups are stored; raises as `put` does, and may be called again then."""
        put.refused.clear()
        try:
            while not put.over:
                if put.current is None and put.refusal is not None and self._on_full == "block":
                    self._await_room(put, put.refusal)
                elif put.current is None:
                    self._begin(put)
                self._advance(put)
        except (StoreError, ConfigError) as error:
            error.stored = len(put.ids)
            raise
        finally:
            if put.places is not None:
                put.places.leave()
        return tuple(put.stored)

    def abandon(self, put: SpreadPut) -> None:
        """End a put; groups that are not stored yet may still arrive, as for `Producer.abandon`."""
        current, put.current = put.current, None
        if current is not None:
            number, pending = current
            put.stored += self._numbering.ids(number, pending.ids)
            self._partitions[number].producer.abandon(pending)

    def _begin(self, put: SpreadPut) -> None:
        """Send the next groups to the least full partition."""
        piece = put.pieces[0]
        number = self._least_full.choose(len(piece.groups), {*put.refused, *self._reach.away})
        put.current = (number, self._partitions[number].producer.send(self._fitted(piece, number)))
        put.pieces.popleft()

    def _await_room(self, put: SpreadPut, refusal: StoreFull) -> None:
        """Wait until a partition has room for some of the next groups, and choose it."""
        piece, every = put.pieces[0], range(len(self._partitions))
        places = put.places = put.places or RoomPlaces(self._task, self._partitions, self._reach)
        deadline = here()
        while True:
            room = places.look(lambda number: self._fitted(piece, number))
            for number in put.refused:  # the server has no memory, or another put was faster
                room[number] = 0
            most = max(room.values(), default=0)
            if most > 0:
                break
            if deadline.over:
                raise refusal
            text = f"task {self._task!r} has no room in {len(every)} partitions: a put waits"
            deadline.log(text, self._partitions[0].store.keys.namespace)
            places.wait()
            put.refused.clear()
        others = [number for number in every if room.get(number, 0) < most]
        number = self._least_full.choose(len(piece.groups), others)
        put.current = (number, places.use(number))
        put.pieces.popleft()

    def _advance(self, put: SpreadPut) -> None:
        """Wait until the current groups are stored, or leave a partition that has no room."""
        if put.current is None:
            return
        number, pending = put.current
        producer = self._partitions[number].producer
        try:
            if pending.repeated:
                producer.finish(pending)
            else:
                self._finish_soon(number, pending)
        except StoreFull as error:
            blocks = self._on_full == "block"
            if put.refusal is not None or not blocks:
                put.refused.add(number)
            put.refusal = error
            if pending.repeated and blocks and not here().over:
                return  # it stays with this partition
            if pending.repeated or (not blocks and len(put.refused) == len(self._partitions)):
                raise
            put.pieces.appendleft(pending.batch.part(len(pending.ids), len(pending.batch.groups)))
        except StoreUnavailable as error:
            if not self._moves(number, error) or here().over:
                raise
            put.pieces.appendleft(pending.batch.part(len(pending.ids), len(pending.batch.groups)))
        self.abandon(put)
        self._least_full.note(number, producer.backlog)

    def _moves(self, number: int, error: StoreUnavailable) -> bool:
        """Return whether a put may go to another partition: nothing of it can still arrive."""
        return not error.uncertain and number not in self._reach.near()

    def _finish_soon(self, number: int, pending: PendingPut) -> None:
        """Store groups without waiting for room; a put that cannot move waits for Redis."""
        producer = self._partitions[number].producer
        try:
            with Deadline(0.0):
                producer.finish(pending)
        except StoreUnavailable as error:
            self._reach.lose(number, error)
            if here().over or self._moves(number, error):
                raise
            producer.finish(pending)

    def _fitted(self, batch: PutBatch, number: int) -> PutBatch:
        """Return groups that were prepared for the first partition as another one needs them."""
        home = self._partitions[0].task.description
        description = self._partitions[number].task.description
        if batch.revision == description.revision:
            return batch
        alike = (home.tags, home.staleness) == (description.tags, description.staleness)
        if batch.revision == home.revision and alike:
            return replace(batch, revision=description.revision)
        return reindexed(batch, description)
