"""`RoomPlaces`: the places of one put in the queues for room of all partitions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from redrb.connection.deadline import SHORT_OUTAGE_S, Deadline
from redrb.connection.request import Request
from redrb.errors import StoreError, StoreUnavailable
from redrb.stream.partitions.partition import Partition
from redrb.stream.partitions.wakes import wait_for_any
from redrb.stream.put.batch import PutBatch
from redrb.stream.put.pending import PendingPut
from redrb.stream.put.scripts import RoomReply
from redrb.stream.task.reach import Reach
from redrb.stream.task.store import QUEUE_TTL_MS

_log = logging.getLogger("redrb")


class RoomPlaces:
    """Queues for room in all partitions at once, for one put.

    In each partition the put waits as a put into that partition alone does, with a name of its own,
    and the room that it is woken for is reserved for it. So the put that has waited longest gets
    the room that is made in any partition. It leaves the other queues when it is stored, and the
    room that was reserved there goes to the next puts.
    """

    def __init__(self, task: str, partitions: Sequence[Partition], reach: Reach) -> None:
        """Make the places; nothing is sent.

        Args:
            task: Name of the task in messages.
            partitions: The partitions.
            reach: Knows which partitions cannot be reached: they have no room.
        """
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

    def wait(self, seconds: float) -> None:
        """Block until a partition has room for this put, or `seconds` are over."""
        wait_for_any(
            [
                (self._partitions[number].opened.store, put.identity.name)
                for number, put in self._near().items()
            ],
            seconds,
        )

    def leave(self) -> None:
        """Leave the queues, so that others need not wait until the places expire."""
        try:
            with Deadline(SHORT_OUTAGE_S):
                self._ask(0)
        except StoreError as error:
            _log.warning(
                "task %r: a put that is over keeps its places in queues for room for %.0f s: %s",
                *(self._task, QUEUE_TTL_MS / 1000, error),
            )
        finally:
            for number, put in self._puts.items():
                self._partitions[number].producer.abandon(put)
            self._puts.clear()

    def _near(self) -> dict[int, PendingPut]:
        near = self._reach.near()
        return {number: put for number, put in self._puts.items() if number in near}

    def _ask(self, ttl_ms: int) -> dict[int, RoomReply]:
        """Ask all partitions that can be reached before the first reply is read."""
        sent: list[tuple[int, Request[RoomReply]]] = []
        replies = {}
        patient = self._reach.all_away
        short = Deadline(repeat_s=None if patient else SHORT_OUTAGE_S)
        try:
            for number, put in self._near().items():
                sent.append(
                    (number, self._partitions[number].producer.ask_room(put, ttl_ms=ttl_ms))
                )
                sent[-1][1].begin()
            while sent:
                number, request = sent.pop(0)
                try:
                    with short:
                        replies[number] = request.result()
                    self._reach.find(number)
                except StoreUnavailable as error:
                    self._reach.lose(number, error)
                    if patient:
                        raise
        finally:
            for _, request in sent:
                request.drop()
        if self._reach.all_away and not patient:
            return self._ask(ttl_ms)
        return replies
