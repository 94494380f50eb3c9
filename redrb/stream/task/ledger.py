"""What happened to every group that was put: the ledger, and what else `stats()` tells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from redrb.experience import Status


@dataclass(frozen=True, slots=True)
class Ledger:
    """Counts of groups, from one moment, as one consumer group sees them.

    Attributes:
        put: Groups stored since the consumer group joined, and those that it found.
        acked: Trained and acknowledged.
        expired: Discarded as too stale.
        filtered: Dropped by a filter at put.
        evicted: Dropped to make room.
        dead: Moved to the dead-letter stream.
        leased: Taken and not ended yet, counted from Redis' pending list.
        waiting: Not taken yet.
    """

    put: int = 0
    acked: int = 0
    expired: int = 0
    filtered: int = 0
    evicted: int = 0
    dead: int = 0
    leased: int = 0
    waiting: int = 0

    @property
    def balanced(self) -> bool:
        """Whether every group is accounted for."""
        ended = self.acked + self.expired + self.filtered + self.evicted + self.dead
        return self.put == ended + self.leased + self.waiting

    def as_dict(self) -> dict[str, int]:
        """Return the counters by name."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class StreamStats:
    """One consistent look at a task from one consumer group.

    Attributes:
        ledger: What happened to the groups.
        joined: 1 when the consumer group has joined; until then the ledger shows what it would
            find.
        stored: Groups in the stream, for whichever consumer group, without the kept history.
        archived: Acknowledged groups that are kept as history.
        limit: Most groups that may be stored; 0: no limit.
        max_bytes: Most bytes that may be stored; 0: no limit.
        capacity: Most groups stored, beyond which puts evict; 0: no capacity.
        version: Newest weight version that the task knows; 0: none.
        reads: Acknowledgements after which a group was to be taken again.
        samples_put: Samples in all groups ever put.
        bytes_put: Bytes of all groups ever put, as stored.
        samples_acked: Samples in the acknowledged groups.
        returned: Leases of groups that went back to waiting, for whatever reason.
        taken_over: Leases of groups taken from consumers whose heartbeat stopped.
        dead_letters: Groups in the dead-letter stream, from all consumer groups.
        consumers: Consumers whose heartbeat is fresh.
        consumers_waiting: Takes that wait for a full batch.
        producers_waiting: Puts that wait for room.
        waiting: Groups that wait, by status; without those of which there are none.
    """

    ledger: Ledger
    joined: int = 0
    stored: int = 0
    archived: int = 0
    limit: int = 0
    max_bytes: int = 0
    capacity: int = 0
    version: int = 0
    reads: int = 0
    samples_put: int = 0
    bytes_put: int = 0
    samples_acked: int = 0
    returned: int = 0
    taken_over: int = 0
    dead_letters: int = 0
    consumers: int = 0
    consumers_waiting: int = 0
    producers_waiting: int = 0
    waiting: Mapping[Status, int] = field(default_factory=dict)

    @classmethod
    def of(cls, counters: Mapping[str, int]) -> StreamStats:
        """Return the stats that a flat set of counters stands for; missing ones are 0."""
        ledger = Ledger(**{name: counters.get(name, 0) for name in Ledger.__slots__})
        own = [name for name in cls.__slots__ if name not in ("ledger", "waiting")]
        waiting = {status: counters.get(f"waiting_{status}", 0) for status in Status}
        if not any(waiting.values()):  # a plain task holds completed groups only
            waiting[Status.COMPLETED] = ledger.waiting
        return cls(
            ledger=ledger,
            waiting={status: groups for status, groups in waiting.items() if groups},
            **{name: counters.get(name, 0) for name in own},
        )
