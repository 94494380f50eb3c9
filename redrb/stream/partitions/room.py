"""`RoomPlaces`: the places of one put in the queues for room of all partitions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from redrb.connection.deadline import SHORT_OUTAGE_S, Deadline
from redrb.connection.request import Request
from redrb.errors import StoreError
from redrb.stream.partitions.partition import Partition
from redrb.stream.put.batch import PutBatch
from redrb.stream.put.calls import RoomReply
from redrb.stream.put.pending import PendingPut
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
                *(self._task, QUEUE_TTL_MS / 1000, error),
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
