"""The calls of the scripts in `redrb/lua/take`: groups are leased, held and given up.

Every call may be repeated as it is when a connection breaks, and is.
"""

from __future__ import annotations

from typing import ClassVar, Literal, TypeAlias

import msgspec
from redis.exceptions import ResponseError

from redrb.connection.client import Request
from redrb.connection.transport import Pipeline, Reply, without_errors
from redrb.experience import Status
from redrb.lua.calls import Call, Found, Page
from redrb.stream.take.cause import NO_CAUSE, Cause
from redrb.stream.task.entries import parse_entries
from redrb.stream.task.store import TaskStore

Outcome: TypeAlias = Literal["ack", "expire", "release", "fail", "reject"]
"""How leased groups end: trained; too stale; requeued; requeued, as a failed delivery; to the dead
letters."""

TakeOutcome: TypeAlias = Literal["taken", "short", "never", "gone", "more", "late", "drawn"]


class Search(msgspec.Struct, frozen=True, omit_defaults=True):
    """How far a take with a query has looked through the groups that wait; Redis reads it again.

    Attributes:
        place: Behind which group the next call goes on.
        found: The groups so far that match.
        stamp: Which groups had entered when the search began: `redrb/lua/include/search.lua`.
    """

    place: str
    found: list[str] = []
    stamp: int = 0


class TakeRequest(msgspec.Struct, frozen=True):
    """Which groups a take asks for.

    Attributes:
        count: Groups in a full batch.
        least: Fewest groups that are accepted when the time is up.
        where: Query that the groups match, as Redis reads it; "" for any.
    """

    count: int
    least: int
    status: Status = Status.COMPLETED
    where: str = ""

    @property
    def full(self) -> TakeRequest:
        """The same request for a full batch only."""
        return TakeRequest(self.count, self.count, self.status, self.where)


class TakeReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """The reply to a take.

    Attributes:
        outcome: "taken"; "short": too few groups wait; "never": a bound of the task never allows
            the batch; "gone": the task was deleted, or has other settings; "more": there is more to
            do before, or to look through, ask again with `search`; "late": a later take of the slot
            came first, or the lease was lost; "drawn": the task's order draws, and takes no query.
        amount: Groups leased, groups waiting, or the limit, as `outcome` says.
        blocked: Makers that wait for room, where too few groups are waiting.
        expired: Groups that turned out to be too stale.
        others: Groups that wait with another status, where too few are waiting and the take is to
            report.
        fates: Counts of all groups, likewise: `redrb/lua/include/outcomes.lua`.
        members: The groups, if the task's order is not that of their ids.
        total_weight: Sum of the weights of all groups that waited.
        held: False when another consumer has taken over the lease that was to end first.
        incarnation: Incarnation of the task in which the groups were leased.
        entries: Id and payload of each group, in the task's order; None where it is gone.
        first_ids: First id of the groups that were requeued with another one.
        search: Where a take with a query goes on.
    """

    outcome: TakeOutcome
    amount: int = 0
    blocked: int = 0
    expired: int = 0
    others: int = 0
    fates: dict[str, int] = {}
    members: list[str] = []
    weights: list[float] = []
    total_weight: float = 0.0
    held: bool = True
    incarnation: str = ""
    entries: list[tuple[int, bytes | None]] = []
    first_ids: dict[int, int] = {}
    search: Search | None = None


class Take(Call[TakeReply], frozen=True):
    """Lease a full batch, or lease nothing and queue.

    Attributes:
        group, consumer, slot: The consumer that takes, and its slot for the lease.
        token: Name of the lease; tokens of a slot count up.
        ttl_ms: How long the place in the queue is kept; 0: do not queue, leave the queue.
        lease_ms: Silence of the consumer's heartbeat after which others take its leases over.
        revision: Of the task's settings, as this process knows them.
        report: Count all groups where too few are waiting.
        search: Of the last reply, if that was "more".
    """

    script: ClassVar = "take/take"
    group: str
    consumer: str
    slot: str
    token: str
    request: TakeRequest
    waiter: str
    ttl_ms: int
    lease_ms: int
    revision: str
    report: bool = False
    search: Search | None = None

    def with_payload(
        self, store: TaskStore, incarnation: str, first: Finish | None
    ) -> Request[TakeReply]:
        """Return the request that leases a batch, or nothing, and reads its payload.

        Args:
            incarnation: Of the task, as this process knows it.
            first: Ends another lease of this consumer in the same round trip, before the take.
        """
        made = Pipeline()
        if first is not None:
            first.add_to(made, store.script_keys)
        self.add_to(made, store.script_keys)
        read = ("XREADGROUP", "GROUP", self.group, self.slot, "COUNT", self.request.count)
        made.add(*read, "STREAMS", store.keys.stream, "0")

        def result(replies: list[Reply]) -> TakeReply:
            *answers, payload = replies
            without_errors(answers)
            held = first is None or first.read(answers[0]) == "ok"
            return self._with(self.read(answers[-1]), payload, incarnation, held=held)

        return Request(store.client, made, result)

    def _with(self, reply: TakeReply, payload: Reply, incarnation: str, *, held: bool) -> TakeReply:
        if reply.outcome != "taken":  # nothing is leased: there may be no consumer group to read
            return msgspec.structs.replace(reply, held=held)
        if isinstance(payload, ResponseError):
            raise payload
        entries, first_ids = parse_entries(payload[0][1] if payload else [])
        if reply.members:
            by_id = dict(entries)
            entries = [(seq, by_id[seq]) for seq in map(int, reply.members) if seq in by_id]
        return msgspec.structs.replace(
            reply,
            held=held,
            incarnation=incarnation,
            entries=entries,
            first_ids=first_ids,
            weights=reply.weights if len(reply.weights) == len(entries) else [],
        )


class Finish(Call[Literal["ok", "lost"]], frozen=True):
    """End a lease, or groups of it; "lost": another consumer has it by now, and nothing is ended.

    Attributes:
        group, consumer, slot, token: The lease.
        seqs: Their ids, as texts: formatting numbers takes Lua ten times as long.
        reason: Why they failed, or are rejected; for their dead letters.
        samples: Samples trained.
        ends: Whether these are the last groups of the lease.
    """

    script: ClassVar = "take/finish"
    group: str
    consumer: str
    slot: str
    token: str
    outcome: Outcome
    seqs: list[str]
    reason: Cause = NO_CAUSE
    samples: int = 0
    ends: bool = True


class Freshness(Page, frozen=True):
    """Whether a batch may be handed over; if not, its lease has ended, in pages."""

    fresh: bool = False


class Recheck(Call[Freshness], frozen=True):
    """Look whether leased groups are within the task's bound of staleness yet.

    Otherwise, and when another consumer has the lease, the lease is over: its groups wait again,
    and those that are too stale have expired.
    """

    script: ClassVar = "take/recheck"
    group: str
    slot: str
    token: str
    status: Status
    seqs: list[str]


class Pulse(msgspec.Struct, frozen=True):
    """The reply to a heartbeat.

    Attributes:
        outcome: "held": the consumer was known, so it has its leases yet; "lost"; "anew": the task
            was created anew since the client has opened it.
        taken_over: Groups taken over from dead consumers.
        due: Whether groups in parts are due.
        more: Whether there are more groups to take over: beat again at once.
        consumers, makers: Some that are late for a heartbeat.
    """

    outcome: Literal["held", "lost", "anew"]
    taken_over: int = 0
    due: bool = False
    more: bool = False
    consumers: tuple[str, ...] = ()
    makers: tuple[str, ...] = ()


class Beat(Call[Pulse], frozen=True):
    """Renew a consumer's deadline; the announcement of its worker, or b"", goes beside it.

    Attributes:
        lease_ms: The consumer is dead after so long without a heartbeat.
    """

    script: ClassVar = "take/heartbeat"
    group: str
    consumer: str
    lease_ms: int
    incarnation: str


class Leave(Call[Found], frozen=True):
    """Requeue the groups that a consumer leases, unharmed.

    Attributes:
        died: Whether it is known to have died: the delivery of each group has failed.
    """

    script: ClassVar = "take/leave"
    group: str
    consumer: str
    died: bool = False


class Drop(Call[Found], frozen=True):
    """Requeue what a take whose reply was lost has leased; a later arrival of it leases nothing.

    Attributes:
        token: Of the take; an older lease in its slot ends too, as its consumer has given it up.
    """

    script: ClassVar = "take/drop"
    group: str
    slot: str
    token: str
