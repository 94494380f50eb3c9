"""`PartitionedProducer`: stores groups exactly once, each put in the least full partition."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from redrb.connection.request import Request
from redrb.errors import ConfigError, StoreError, StoreFull, StoreUnavailable
from redrb.stream.partitions.ids import Numbering
from redrb.stream.partitions.least_full import LeastFull
from redrb.stream.partitions.partition import Partition
from redrb.stream.put.batch import PutBatch
from redrb.stream.put.pending import CHUNK_GROUPS, PendingPut
from redrb.stream.put.reindexing import reindexed
from redrb.stream.put.room import OnFull
from redrb.stream.put.scripts import PutReply
from redrb.stream.task.description import TaskDescription
from redrb.stream.waiting import Wait


@dataclass(slots=True)
class SpreadPut:
    """An unfinished put of groups that may go to several partitions.

    Attributes:
        batch: All groups.
        numbering: Ids of the task.
        pieces: Groups that were not sent to a partition yet, in parts of at most 32.
        stored: Ids of the groups whose partition has confirmed them, from the first.
        current: The partition that gets the next groups, and the put into it.
    """

    batch: PutBatch
    numbering: Numbering
    pieces: deque[PutBatch] = field(default_factory=deque)
    stored: list[int] = field(default_factory=list)
    current: tuple[int, PendingPut] | None = None

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
    finds no room goes to the next partition; when all are full it waits at the least full one for
    a part of its time and then looks at all of them again. It moves only if no attempt can still
    arrive, so that no group is stored twice.
    """

    def __init__(self, partitions: Sequence[Partition], on_full: OnFull) -> None:
        """Make a producer.

        Args:
            partitions: The partitions.
            on_full: What a put does when no partition has room.
        """
        self._partitions = partitions
        self._numbering = Numbering(len(partitions))
        self._on_full = on_full
        self._least_full = LeastFull(len(partitions))

    def put(self, batch: PutBatch, timeout: float | None) -> tuple[int, ...]:
        """Store groups; returns their ids in order. Raises as `Producer.put` does."""
        put = SpreadPut(batch, self._numbering)
        try:
            return self.finish(put, timeout)
        finally:
            self.abandon(put)

    def send(self, batch: PutBatch) -> SpreadPut:
        """Send groups without waiting for the reply; `finish` must follow."""
        put = SpreadPut(batch, self._numbering)
        if len(put.pieces) == 1:
            self._begin(put, set())
        return put

    def finish(self, put: SpreadPut, timeout: float | None) -> tuple[int, ...]:
        """Wait until all groups are stored; raises as `put` does, and may be called again then."""
        wait = Wait(timeout)
        full: set[int] = set()
        try:
            while not put.over:
                if put.current is None:
                    self._begin(put, full)
                self._advance(put, full, wait)
        except (StoreError, ConfigError) as error:
            error.stored = len(put.ids)
            raise
        return tuple(put.stored)

    def abandon(self, put: SpreadPut) -> None:
        """End a put; groups that are not stored yet may still arrive, as for `Producer.abandon`."""
        current, put.current = put.current, None
        if current is not None:
            number, pending = current
            put.stored += self._numbering.ids(number, pending.ids)
            self._partitions[number].producer.abandon(pending)

    def close(self) -> None:
        """Do nothing: each partition closes its producer."""

    def _begin(self, put: SpreadPut, full: set[int]) -> None:
        """Send the next groups to the least full partition."""
        piece = put.pieces[0]
        number = self._least_full.choose(len(piece.groups), full)
        partition = self._partitions[number]
        piece = self._fitted(piece, partition.opened.description)
        put.current = (number, partition.producer.send(piece))
        put.pieces.popleft()

    def _advance(self, put: SpreadPut, full: set[int], wait: Wait) -> None:
        """Wait until the current groups are stored, or leave a partition that has no room."""
        if put.current is None:
            return
        number, pending = put.current
        producer = self._partitions[number].producer
        elsewhere = len(full | {number}) < len(self._partitions) and not pending.repeated
        try:
            if elsewhere:
                self._finish_soon(number, pending, wait)
            elif pending.repeated:
                producer.finish(pending, wait.left_s)
            else:
                producer.finish(pending, wait.slice_s())
        except StoreFull:
            if pending.repeated or (not elsewhere and (self._on_full != "block" or wait.over)):
                raise
            full.add(number)
            if not elsewhere:
                full.clear()
            batch = pending.batch
            put.pieces.appendleft(batch.part(len(pending.ids), len(batch.groups)))
        self.abandon(put)
        self._least_full.note(number, producer.backlog)

    def _finish_soon(self, number: int, pending: PendingPut, wait: Wait) -> None:
        """Store groups without waiting for room, however long Redis is away."""
        producer = self._partitions[number].producer
        try:
            producer.finish(pending, 0.0)
        except StoreUnavailable:
            if wait.over:
                raise
            producer.finish(pending, wait.left_s)

    def _fitted(self, batch: PutBatch, description: TaskDescription) -> PutBatch:
        """Return groups that were prepared for the first partition as another one needs them."""
        home = self._partitions[0].opened.description
        if batch.revision == description.revision:
            return batch
        alike = (home.tags, home.staleness) == (description.tags, description.staleness)
        if batch.revision == home.revision and alike:
            return replace(batch, revision=description.revision)
        return reindexed(batch, description)
