"""`StreamStats`: ledger and counters of a task, as `stats()` returns them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from redrb.experience import Status

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_LARGEST = frozenset(
    "joined version consumers consumers_waiting producers_waiting returns_s over_s pid "
    "period_s lease_s uptime_s seen_s weight_version behind metrics waits_s step_s usual_step_s "
    "step_limit_s steps steps_s".split()
)
"""Numbers of several tasks that are not added: each process does the same in all, and the worst
counts. A take, or a put, that waits does so in all."""

_COMPOUND = ("ledger", "waiting", "admission", "parts", "sessions")
"""Attributes that are no counters."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """The fate of every group, at one moment, as one consumer group sees it.

    Attributes:
        put: Groups that the consumer group found when it joined, and groups put since then.
        acked: Groups acknowledged.
        expired: Groups discarded as too stale.
        filtered: Groups dropped by a filter at put.
        evicted: Groups dropped to make room.
        dead: Groups moved to the dead-letter stream.
        leased: Groups in leases, counted from Redis' pending list.
        waiting: Groups not taken yet.
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
        """Whether `put` is the sum of all others, so that no group is lost or counted twice."""
        ended = self.acked + self.expired + self.filtered + self.evicted + self.dead
        return self.put == ended + self.leased + self.waiting

    def as_dict(self) -> dict[str, int]:
        """Return the counters by name."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class AdmissionStats:
    """The rights to begin groups that a task has given, at one moment.

    Attributes:
        granted: Rights given, ever.
        used: Rights that a put has used.
        returned: Rights that came back unused, or whose group was filtered or dropped.
        lost: Rights taken back from makers that died, or held them for too long.
        held: Rights that makers hold.
        late: Puts whose right had been taken back before; their groups are stored.
        released: Groups that were begun beyond the bound, as all would have waited for each other.
        waiting: Requests that wait for rights.
        most: Most groups that may be begun and not yet trained.
        left: Rights that may be given now; not positive while makers must wait.
        makers: Held rights by maker, of at most 100 makers.
        returns_s: Seconds until the rights of each of them return, if no heartbeat of it comes.
    """

    granted: int = 0
    used: int = 0
    returned: int = 0
    lost: int = 0
    held: int = 0
    late: int = 0
    released: int = 0
    waiting: int = 0
    most: int = 0
    left: int = 0
    makers: Mapping[str, int] = field(default_factory=dict)
    returns_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def balanced(self) -> bool:
        """Whether `granted` is the sum of used, returned, lost and held rights."""
        return self.granted == self.used + self.returned + self.lost + self.held

    @classmethod
    def of(cls, counters: Mapping[str, int]) -> AdmissionStats | None:
        """Return the stats of a flat map of counters; None if the task gives no rights."""
        if "admission:granted" not in counters:
            return None
        makers = {
            name.removeprefix("maker:"): held
            for name, held in counters.items()
            if name.startswith("maker:")
        }
        returns_s = {name: counters.get(f"return:{name}", 0) / 1000 for name in makers}
        names = [name for name in cls.__slots__ if name not in ("makers", "returns_s")]
        known = {name: counters[f"admission:{name}"] for name in names}
        return cls(**known, makers=makers, returns_s=returns_s)


@dataclass(frozen=True, slots=True)
class PartStats:
    """The groups that makers put in parts, at one moment.

    Attributes:
        groups: Groups of which some parts wait.
        waiting: Parts of these groups.
        bytes: Their bytes, as stored. They do not count toward `max_bytes`.
        begun: Groups of which a part was ever put.
        completed: Groups that were put with all parts; a filter may have dropped them.
        delivered: Groups that were put at the age limit, with at least `least` parts.
        dropped: Groups that were removed: they had too few parts at the age limit, or the parts do
            not form a group.
        dead: Groups that became a dead letter.
        repeated: Parts that came again while their group waited.
        late: Parts of groups that had been put or removed before.
    """

    groups: int = 0
    waiting: int = 0
    bytes: int = 0
    begun: int = 0
    completed: int = 0
    delivered: int = 0
    dropped: int = 0
    dead: int = 0
    repeated: int = 0
    late: int = 0

    @property
    def balanced(self) -> bool:
        """Whether `begun` is the sum of the groups that wait and of all that have ended."""
        ended = self.completed + self.delivered + self.dropped + self.dead
        return self.begun == self.groups + ended

    @classmethod
    def of(cls, counters: Mapping[str, int]) -> PartStats | None:
        """Return the stats of a flat map of counters; None if no group was put in parts."""
        if "parts:begun" not in counters:
            return None
        return cls(**{name: counters[f"parts:{name}"] for name in cls.__slots__})


@dataclass(frozen=True, slots=True)
class SessionStats:
    """The sessions of agents at gateways of a task, at one moment.

    Attributes:
        open: Sessions that have neither a reward nor ended in another way.
        silent: Those of them that nobody has used for half of the time after which they are gone.
        begun: Sessions that ever began.
        turns: Turns of all of these.
    """

    open: int = 0
    silent: int = 0
    begun: int = 0
    turns: int = 0

    @classmethod
    def of(cls, counters: Mapping[str, int]) -> SessionStats | None:
        """Return the stats of a flat map of counters; None if there was no session."""
        if "sessions:begun" not in counters:
            return None
        return cls(**{name: counters[f"sessions:{name}"] for name in cls.__slots__})


@dataclass(frozen=True, slots=True)
class StreamStats:
    """Counters of a task at one moment, as one consumer group sees it.

    Attributes:
        ledger: The fate of every group.
        joined: 1 when the consumer group has joined; 0 before that, when the ledger counts what it
            would find.
        stored: Groups in the stream that any consumer group needs.
        limit: Most groups that may be stored; 0: no limit.
        max_bytes: Most bytes that may be stored; 0: no limit.
        version: Newest weight version that the task knows; 0: none.
        reads: Acknowledgements after which the group waited to be taken again.
        samples_put: Samples in all groups ever put.
        bytes_put: Bytes of all groups ever put, as stored.
        samples_acked: Samples in the acknowledged groups.
        returned: Times that a leased group returned to the queue, for any reason.
        taken_over: Times that a leased group was taken from a consumer whose heartbeat stopped.
        dead_letters: Groups in the dead-letter stream, from all consumer groups.
        dead_dropped: Dead letters that were deleted: by `max_dead`, `drop_dead_letters` or
            `drop_group`. The ledger goes on counting them as dead.
        consumers: Consumers whose heartbeat is fresh.
        consumers_waiting: Takes that wait for a full batch.
        producers_waiting: Puts that wait for room.
        makers: Makers with rights to begin groups, or that wait for some, whose heartbeat is fresh.
        waiting: Waiting groups by status; a status without groups is left out.
        admission: The rights to begin groups; None in a task without `groups_per_version`.
        parts: The groups that come in parts; None if there was none.
        sessions: The sessions of agents at gateways; None if there was none.
    """

    ledger: Ledger
    joined: int = 0
    stored: int = 0
    limit: int = 0
    max_bytes: int = 0
    version: int = 0
    reads: int = 0
    samples_put: int = 0
    bytes_put: int = 0
    samples_acked: int = 0
    returned: int = 0
    taken_over: int = 0
    dead_letters: int = 0
    dead_dropped: int = 0
    consumers: int = 0
    consumers_waiting: int = 0
    producers_waiting: int = 0
    makers: int = 0
    waiting: Mapping[Status, int] = field(default_factory=dict)
    admission: AdmissionStats | None = None
    parts: PartStats | None = None
    sessions: SessionStats | None = None

    @classmethod
    def of(cls, counters: Mapping[str, int]) -> StreamStats:
        """Return the stats of a flat map of counters; missing ones are 0."""
        ledger = Ledger(**{name: counters.get(name, 0) for name in Ledger.__slots__})
        others = [name for name in cls.__slots__ if name not in _COMPOUND]
        waiting = {status: counters.get(f"waiting_{status}", 0) for status in Status}
        if not any(waiting.values()):  # the consumer group has not joined
            waiting[Status.COMPLETED] = ledger.waiting
        return cls(
            ledger=ledger,
            waiting={status: groups for status, groups in waiting.items() if groups},
            admission=AdmissionStats.of(counters),
            parts=PartStats.of(counters),
            sessions=SessionStats.of(counters),
            **{name: counters.get(name, 0) for name in others},
        )


Record = TypeVar("Record", bound="DataclassInstance")


def summed(records: Sequence[Record]) -> Record:
    """Return one record for several tasks on which the same processes work, such as shards.

    Numbers are added, maps by key, and records in fields likewise; of those in `_LARGEST` the
    largest counts. Of other values the first one that is not empty counts.
    """
    changes = {
        each.name: _together(each.name, [getattr(record, each.name) for record in records])
        for each in fields(records[0])
    }
    return replace(records[0], **changes)


def _together(name: str, values: Sequence[Any]) -> Any:
    known = [value for value in values if value is not None]
    first = next(filter(None, known), known[0] if known else None)
    if isinstance(first, Mapping):
        keys = dict.fromkeys(key for each in known for key in each)
        return {key: _together(name, [each.get(key) for each in known]) for key in keys}
    if is_dataclass(first):
        return summed(known)
    if isinstance(first, bool) or not isinstance(first, int | float):
        return first
    return max(known) if name in _LARGEST else sum(known)
