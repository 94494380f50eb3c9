"""`Collection`: the groups that one take has leased so far, of several partitions."""

from __future__ import annotations

import logging
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from redrb.connection.deadline import SHORT_OUTAGE_S, Deadline
from redrb.stream.take.calls import TakeReply, TakeRequest
from redrb.stream.take.endings import end_parts
from redrb.stream.take.fates import fates_seen_by
from redrb.stream.take.lease_part import LeasePart

_log = logging.getLogger("redrb")


@dataclass(slots=True)
class Collection:
    """An unfinished batch: its parts are leased, and released again if it stays incomplete.

    Attributes:
        waiter: Name of the take in the queues of the partitions.
        parts: Leased groups, in the order in which they were leased.
        short: Partition -> its last reply, if it had too few groups.
        left: Partition -> groups that wait there still, as far as is known.
        expired: Groups that turned out to be too stale.
        queued: Whether the take may be in queues.
    """

    request: TakeRequest
    waiter: str = field(default_factory=lambda: f"take-{uuid.uuid4().hex}")
    parts: list[LeasePart] = field(default_factory=list)
    short: dict[int, TakeReply] = field(default_factory=dict)
    left: dict[int, int] = field(default_factory=dict)
    expired: int = 0
    queued: bool = False

    def __len__(self) -> int:
        """Return the number of groups that are leased."""
        return sum(map(len, self.parts))

    @property
    def missing(self) -> int:
        """Groups that the full batch lacks."""
        return self.request.count - len(self)

    def asked(self, share: int) -> TakeRequest:
        """Return the request for up to so many groups of one partition."""
        return TakeRequest(share, 1, self.request.status, self.request.where)

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
        parts, self.parts = self.parts, []
        with Deadline(SHORT_OUTAGE_S):
            errors = end_parts("release", [(part, part.ids) for part in parts])
        for part in parts:
            if part in errors:
                _log.warning(
                    "task %r, partition %d: a part of a batch is requeued later: %s",
                    *(part.task, part.number, errors[part]),
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
        return total


def spread(groups: int, partitions: list[int]) -> dict[int, int]:
    """Return how many of some groups to take of each partition, about as many of each."""
    whole, more = divmod(groups, len(partitions)) if partitions else (0, 0)
    shares = {number: whole + (place < more) for place, number in enumerate(partitions)}
    return {number: share for number, share in shares.items() if share}


def fill(groups: int, left: Mapping[int, int]) -> dict[int, int]:
    """Return how many of some groups to take of each partition, the fullest first."""
    shares: dict[int, int] = {}
    for number in sorted(left, key=lambda one: -left[one]):
        share = min(groups, left[number])
        if share > 0:
            shares[number] = share
            groups -= share
    return shares
