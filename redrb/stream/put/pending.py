"""The state of one unfinished put: its number, its groups, how many are stored, what is tried."""

from __future__ import annotations

import uuid
from collections import deque
from dataclasses import dataclass, field

from redrb.connection.client import Request
from redrb.stream.put.batch import PutBatch
from redrb.stream.put.calls import Put, PutReply
from redrb.stream.put.rights import NO_RIGHTS
from redrb.stream.task.description import TaskDescription

CHUNK_GROUPS = 32
"""Most groups a transaction; larger ones are no faster."""

CHUNK_BYTES = 4 << 20
"""Most bytes a transaction, unless a single group is larger."""


@dataclass(slots=True)
class ProducerIdentity:
    """A producer as Redis knows it; used for one put at a time, so that its puts are in order.

    Attributes:
        operation: Number of its last put.
        interrupted: Whether an attempt may have been sent whose reply is unknown. It may still
            reach the server, and must then find the number of a put that is done.
    """

    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    operation: int = 0
    interrupted: bool = False


@dataclass(slots=True)
class PendingPut:
    """Groups on their way into a task.

    Attributes:
        idle: Where the identity waits for the next put. A forked child has none of its parent's.
        ids: Ids of the groups that are certainly stored, from the first.
        numbered: Whether the next chunk has its operation number: the identity's last one.
        incarnation: Incarnation of the task in which the chunk got its number.
        epoch: Epoch in which it got its number; all attempts to store the chunk name it.
        repeated: Whether an attempt to store the chunk may have been stored without a reply.
        sent: The request for the next chunk, if it was sent already.
        counted: Whether a chunk is stored, and with the first one the groups that were dropped.
    """

    identity: ProducerIdentity
    batch: PutBatch
    idle: deque[ProducerIdentity]
    ids: list[int] = field(default_factory=list)
    numbered: bool = False
    incarnation: str = ""
    epoch: int = 0
    repeated: bool = False
    sent: Request[PutReply] | None = None
    counted: bool = False

    def number(self, incarnation: str, epoch: int) -> None:
        """Give the next chunk its operation number; all attempts to store it use the same one."""
        self.identity.operation += 1
        self.numbered = True
        self.incarnation, self.epoch = incarnation, epoch

    def chunk(self) -> PutBatch:
        """Return the groups of the next transaction: at least one, if there are any."""
        groups = self.batch.groups
        start = end = len(self.ids)
        size = 0
        while end < len(groups) and end - start < CHUNK_GROUPS:
            size += groups[end].nbytes
            if end > start and size > CHUNK_BYTES:
                break
            end += 1
        return self.batch.part(start, end)

    def call(self, batch: PutBatch, description: TaskDescription) -> Put:
        """Return the call that counts groups of the chunk.

        It names the settings that the batch was prepared for, because the task may have others by
        now.
        """
        statuses = {group.status for group in batch.groups}
        return Put(
            producer=self.identity.name,
            operation=self.identity.operation,
            epoch=self.epoch,
            samples=sum([group.samples for group in batch.groups]),
            nbytes=batch.nbytes,
            filtered=batch.filtered,
            expired=batch.expired,
            revision=batch.revision,
            status=statuses.pop() if len(statuses) == 1 else "",
            kind="" if batch.kind == description.kind else batch.kind,
            rights=None if batch.rights is NO_RIGHTS else batch.rights.record(),
            sources=batch.sources.record(),
            parts=batch.parts,
        )

    def note_stored(self, reply: PutReply) -> None:
        """Note that the chunk, or its first groups, are stored."""
        self.ids += range(reply.last - reply.stored + 1, reply.last + 1)
        self.identity.interrupted |= self.repeated
        self.numbered, self.repeated, self.counted = False, False, True


@dataclass(slots=True)
class Attempt:
    """The next attempt to store a chunk of a put.

    Attributes:
        most: How many of its groups to store, at most, from the first.
        evict: Least number of groups to evict in the same transaction; None: evict nothing.
        queued: Whether the producer has queued for room.
        refused: Earlier attempts that found no room.
    """

    pending: PendingPut
    most: int = CHUNK_GROUPS
    evict: int | None = None
    queued: bool = False
    refused: int = 0

    @property
    def batch(self) -> PutBatch:
        """The groups to store."""
        return self.pending.chunk().part(0, self.most)
