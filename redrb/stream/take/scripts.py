"""The scripts of `redrb/lua/take`: groups are leased, held and given up.

Every method may be repeated with the same arguments when a connection breaks, and is: see the
headers of the scripts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, TypeVar

from redis.exceptions import ResponseError

from redrb.connection.request import Request
from redrb.connection.transport import Argument, Pipeline, Reply, first_error
from redrb.damage import Reading
from redrb.experience import Status
from redrb.lua.scripts import add_to, load, scripted_request
from redrb.stream.take.cause import NO_CAUSE, Cause
from redrb.stream.take.fates import read_fates
from redrb.stream.task.entries import first_ids, member_of, parse_entry
from redrb.stream.task.store import TaskStore

T = TypeVar("T")

Outcome: TypeAlias = Literal["ack", "expire", "release", "fail", "reject"]
"""How leased groups end."""

Beat: TypeAlias = Literal["held", "lost", "anew"]
"""Result of a heartbeat; see `redrb/lua/take/heartbeat.lua`."""

TakeOutcome: TypeAlias = Literal["taken", "short", "never", "gone", "more", "late", "ranks"]


@dataclass(frozen=True, slots=True)
class TakeRequest:
    """Which groups a take asks for.

    Attributes:
        count: Groups in a full batch.
        least: Fewest groups that are accepted when the time is up.
        status: Status of the groups.
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


@dataclass(frozen=True, slots=True)
class TakeReply:
    """The reply to a take.

    Attributes:
        outcome: "taken"; "short": too few groups wait; "never": limit or rate never allow the
            batch; "gone": the task was deleted, or has other settings; "more": there is more to do
            before, ask again; "late": a later take of the slot came first; "ranks": ranks take from
            this consumer group.
        amount: Groups leased, groups waiting, or the limit, as `outcome` says.
        blocked: Producers that wait for room, where too few groups are waiting.
        expired: Groups that turned out to be too stale, where too few are waiting.
        others: Groups that wait with another status, where too few are waiting and the take is to
            report.
        fates: Counts of all groups, likewise.
        entries: Id and payload of each group, in the task's order; None where it is gone.
        weights: Weight of each, in an order that draws; else empty.
        total_weight: Sum of the weights of all groups that waited.
        held: False when another consumer has taken over the lease that was to end first.
        incarnation: Incarnation of the task in which the groups were leased.
        left: Groups that wait still, where a batch was leased for the first time.
        first_ids: First id of the groups that were requeued with another one.
    """

    outcome: TakeOutcome
    amount: int = 0
    blocked: int = 0
    entries: tuple[tuple[int, bytes | None], ...] = ()
    held: bool = True
    weights: tuple[float, ...] = ()
    total_weight: float = 0.0
    expired: int = 0
    others: int = 0
    fates: Mapping[str, int] = field(default_factory=dict)
    incarnation: str = ""
    left: int = 0
    first_ids: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LookReply:
    """The reply to a look at a partition.

    Attributes:
        outcome: "found"; "gone": the task was deleted, or has other settings; "more": the consumer
            group is joining, or groups are being sorted, so look again.
        free: Groups that the waiter may take.
    """

    outcome: Literal["found", "gone", "more"]
    free: int = 0


@dataclass(frozen=True, slots=True)
class Ending:
    """How groups of a lease end.

    Attributes:
        slot: The lease's slot.
        token: The lease's token.
        outcome: How they end.
        ids: The groups.
        reason: Why they failed, or are rejected; for their dead letters.
        samples: Samples in the groups.
        ends: Whether these are the last groups of the lease.
    """

    slot: str
    token: str
    outcome: Outcome
    ids: tuple[int, ...]
    reason: Cause = NO_CAUSE
    samples: int = 0
    ends: bool = True

    def arguments(self, group: str, consumer: str) -> list[Argument]:
        """Return the ARGV of the script `finish`."""
        lease = [group, consumer, self.slot, self.token, self.outcome]
        return [*lease, *self.reason.arguments(), self.samples, int(self.ends), *self.ids]


def take_arguments(
    group: str,
    consumer: str,
    slot: str,
    token: str | int,
    request: TakeRequest,
    *,
    waiter: str,
    ttl_ms: int,
    lease_ms: int,
    revision: str,
    report: bool = False,
) -> list[Argument]:
    """Return the ARGV of the script `take/take`.

    Args:
        group, consumer, slot: The consumer that takes, and its slot for the lease.
        token: Name of the lease; tokens of a slot count up.
        request: The groups.
        waiter: Name in the queue of takes.
        ttl_ms: How long the place in the queue is kept; 0: do not queue, leave the queue.
        lease_ms: Silence of the consumer's heartbeat after which others take its leases over.
        revision: Of the task's settings, as this process knows them.
        report: Count all groups where too few are waiting.
    """
    taking: list[Argument] = [group, consumer, slot, token, request.count, request.least]
    place: list[Argument] = [waiter, ttl_ms, lease_ms]
    return [*taking, *place, request.status, request.where, revision, int(report)]


class TakeScripts:
    """Runs the scripts of consumers on one task."""

    def __init__(self, store: TaskStore) -> None:
        self._store = store

    def take(
        self,
        group: str,
        consumer: str,
        slot: str,
        token: str,
        request: TakeRequest,
        *,
        waiter: str,
        ttl_ms: int,
        lease_ms: int,
        revision: str,
        incarnation: str,
        report: bool,
        first: Ending | None = None,
    ) -> Request[TakeReply]:
        """Return the request that leases a batch, or nothing, and reads its payload.

        In the same round trip, and before it, another lease of this consumer may end: `first`.
        """
        arguments = take_arguments(
            *(group, consumer, slot, token, request),
            waiter=waiter,
            ttl_ms=ttl_ms,
            lease_ms=lease_ms,
            revision=revision,
            report=report,
        )
        scripts = [("take/take", arguments)]
        if first is not None:
            scripts.insert(0, ("take/finish", first.arguments(group, consumer)))
        store = self._store
        read = ("XREADGROUP", "GROUP", group, slot, "COUNT", request.count)

        def pipeline(*, whole: bool) -> Pipeline:
            made = Pipeline()
            for script, argv in scripts:
                add_to(made, load(script), store.script_keys, argv, whole=whole)
            made.add(*read, "STREAMS", store.keys.stream, "0")
            return made

        return scripted_request(
            store.client, pipeline, lambda replies: _take_reply(replies, incarnation)
        )

    def look(
        self,
        group: str,
        waiter: str,
        request: TakeRequest,
        *,
        ttl_ms: int,
        revision: str,
    ) -> Request[LookReply]:
        """Return the request that counts groups for a take of several partitions, and queues it.

        Args:
            group: Consumer group.
            waiter: Name in the queue.
            request: `least`: groups for which the waiter is woken; `count`: groups it can use.
            ttl_ms: How long the place in the queue is kept; 0: leave the queue.
            revision: Of the task's settings, as this process knows them.
        """
        place: list[Argument] = [group, waiter, request.least, request.count, ttl_ms]

        def read(reply: Reply) -> LookReply:
            outcome, *found = reply
            return LookReply(outcome.decode(), *found)

        arguments = [*place, request.status, request.where, revision]
        return self._store.request("take/look", arguments, read)

    def finish(
        self, group: str, consumer: str, ending: Ending, read: Callable[[str], T]
    ) -> Request[T]:
        """Return the request that ends a lease or a part of it.

        `read` is given its result, "ok", or "lost" when the lease is another consumer's by now.
        """
        arguments = ending.arguments(group, consumer)
        return self._store.request("take/finish", arguments, lambda reply: read(reply[0].decode()))

    def recheck(
        self,
        group: str,
        consumer: str,
        slot: str,
        token: str,
        status: Status,
        ids: Sequence[int],
    ) -> bool:
        """Look whether leased groups are within the task's bound of staleness yet.

        Otherwise, and when another consumer has the lease, the lease is over: its groups wait
        again, and those that are too stale have expired.
        """
        arguments: list[Argument] = [group, consumer, slot, token, status, *ids]
        outcome = b"more"
        while outcome == b"more":
            (outcome,) = self._store.run("take/recheck", arguments)
        return bool(outcome == b"fresh")

    def heartbeat(
        self,
        group: str,
        consumer: str,
        lease_ms: int,
        incarnation: str,
        announcement: bytes = b"",
    ) -> tuple[Beat, int, bool, bool]:
        """Renew a consumer's deadline, and store the announcement of its worker, if it is not b"".

        Returns:
            Whether it was known, the groups taken over, whether groups in parts are due, and
            whether there are more groups to take over.
        """
        arguments: list[Argument] = [group, consumer, lease_ms, incarnation, announcement]
        outcome, taken_over, due, more = self._store.run("take/heartbeat", arguments)
        return outcome.decode(), int(taken_over), bool(due), bool(more)

    def leave(self, group: str, consumer: str) -> int:
        """Requeue the groups that a consumer leases, unharmed; returns their number."""
        return sum(int(found) for _, found in self._store.pages("take/leave", [group, consumer]))

    def drop(self, group: str, consumer: str, slot: str, token: str) -> int:
        """Requeue what a take whose reply was lost has leased; returns the number of groups."""
        pages = self._store.pages("take/drop", [group, consumer, slot, token])
        return sum(int(found) for _, found in pages)

    def expiries(self, group: str, ids: Sequence[int]) -> list[str | None]:
        """Return the rules by which groups expired, as the three words of `Expiry`."""
        key = f"{self._store.keys.prefix}expiries:{group}"
        found = self._store.client.execute("HMGET", key, *map(member_of, ids))
        with Reading("the rules by which groups expired"):
            return [text and text.decode() for text in found]


def _take_reply(replies: list[Reply], incarnation: str) -> TakeReply:
    *answers, payload = replies
    error = first_error(answers)
    if error is not None:
        raise error
    held = len(answers) == 1 or answers[0][0] == b"ok"
    outcome, *values = answers[-1]
    if outcome != b"taken":  # nothing was leased, so there may be no consumer group to read yet
        word: TakeOutcome = outcome.decode()
        if word == "more":
            return TakeReply(word, held=held, expired=values[0])
        *numbers, fates = values if word == "short" else (*values, ())
        amount, blocked, expired, others = (*numbers, 0, 0, 0, 0)[:4]
        return TakeReply(
            word,
            amount,
            blocked,
            held=held,
            expired=expired,
            others=others,
            fates=read_fates(fates),
        )
    if isinstance(payload, ResponseError):
        raise payload
    raw = payload[0][1] if payload else []
    entries = list(map(parse_entry, raw))
    amount, members, weights, left = (*values, 0)[:4]
    if members:
        by_id = dict(entries)
        entries = [(seq, by_id[seq]) for seq in map(int, members) if seq in by_id]
    each: list[float] = []
    total = 0.0
    if weights and len(weights) == len(entries) + 1:
        *each, total = map(float, weights)
    return TakeReply(
        "taken",
        amount,
        entries=tuple(entries),
        first_ids=first_ids(raw),
        held=held,
        weights=tuple(each),
        total_weight=total,
        incarnation=incarnation,
        left=left,
    )
