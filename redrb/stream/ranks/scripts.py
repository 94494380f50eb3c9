"""Typed functions for the scripts of `redrb/lua/ranks`, each safe to repeat."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from redrb.connection.request import Request
from redrb.connection.transport import Argument, Reply
from redrb.damage import Reading
from redrb.stream.take.cause import Cause
from redrb.stream.take.fates import read_fates
from redrb.stream.take.scripts import Outcome, TakeOutcome, TakeRequest, take_arguments
from redrb.stream.task.entries import first_ids, parse_entry
from redrb.stream.task.store import TaskStore

RANKS = "ranks"
"""The consumer that leases the parts of all ranks, see `redrb/lua/include/ranks.lua`."""

MOST_STEPS = 64
"""Most steps that are formed and not acknowledged by all ranks."""

UNFINISHED = "0 unfinished=1"
"""Counts of an attempt that ended before its groups were counted."""

RankOutcome: TypeAlias = Literal[
    "part",
    "form",
    "wait",
    "ended",
    "done",
    "early",
    "unacked",
    "differs",
    "replaced",
    "held",
    "leased",
    "gone",
    "more",
]

Loss: TypeAlias = Literal["replaced", "anew", "ended"]
"""Why a rank cannot end its part any more; see `redrb/lua/ranks/finish.lua`."""


@dataclass(frozen=True, slots=True)
class RankStep:
    """One rank in one step.

    Attributes:
        rank: Of 0 to `world_size - 1`.
        world_size: Number of ranks.
        step: Number of the step.
    """

    rank: int
    world_size: int
    step: int

    @property
    def slot(self) -> str:
        """The slot to which this rank's part of the step is leased."""
        return f"{RANKS}/{self.step}.{self.rank}"


@dataclass(frozen=True, slots=True)
class RankReply:
    """The reply to a rank that asked for its part; see `redrb/lua/ranks/take.lua`.

    Attributes:
        outcome: The case.
        number: An attempt, a step, a number of ranks or of groups, as `outcome` says.
        ranks: Ranks that the reply is about.
        ids: Of "part": its groups.
        text: Of "part" the weights, of "ended" the reason, of "differs" the request of other ranks.
        counts: Of "ended" by a timeout: counts of groups and producers at the last look.
    """

    outcome: RankOutcome
    number: int = 0
    ranks: tuple[int, ...] = ()
    ids: tuple[int, ...] = ()
    text: str = ""
    counts: str = ""


@dataclass(frozen=True, slots=True)
class BatchReply:
    """The reply to a rank that leased the batch of a step.

    Attributes:
        outcome: As of `take`.
        counts: Groups waiting, producers waiting for room, groups expired, groups with another
            status; or the limit.
        ids: The groups that were leased, in the task's order.
        weights: Weight by id, and under 0 the weight of all groups that waited; None if the order
            does not draw.
        fates: Counts of all groups, where too few are waiting and the time is up.
    """

    outcome: TakeOutcome
    counts: tuple[int, ...] = ()
    ids: tuple[int, ...] = ()
    weights: dict[int, bytes] | None = None
    fates: Mapping[str, int] = field(default_factory=dict)

    @property
    def counts_as_text(self) -> str:
        """Counts and fates for the errors of all ranks."""
        named = (f"{name}={number}" for name, number in self.fates.items())
        return " ".join([*map(str, self.counts), *named])


class RankStore:
    """The ranks of one consumer group in Redis."""

    def __init__(self, store: TaskStore, group: str) -> None:
        self._store = store
        self._group = group
        self._waiter = f"{RANKS}:{group}"

    def ask(
        self,
        consumer: str,
        place: RankStep,
        spec: str,
        *,
        attempt: int,
        joined: bool,
        last: bool,
        lease_ms: int,
        incarnation: str,
    ) -> RankReply:
        """Ask for a part.

        Args:
            consumer: The process that is this rank.
            place: The rank and its step.
            spec: The request, the same for all ranks.
            attempt: Attempt in which the rank asked before, or 0.
            joined: Whether this process was this rank before.
            last: Whether the rank's time is up.
            lease_ms: Silence after which the rank is lost.
            incarnation: Of the task, as this process knows it.
        """
        arguments: list[Argument] = [self._group, consumer, place.rank, place.world_size]
        arguments += [place.step, spec, attempt, int(joined), int(last), lease_ms, MOST_STEPS]
        arguments.append(incarnation)
        outcome, *values = self._store.run("ranks/take", arguments)
        return _rank_reply(outcome.decode(), values)

    def lease_batch(
        self,
        consumer: str,
        step: int,
        attempt: int,
        request: TakeRequest,
        *,
        ttl_ms: int,
        lease_ms: int,
        revision: str,
    ) -> BatchReply:
        """Lease the batch of a step, or queue for it; the same attempt finds the same batch."""
        slot = f"{RANKS}/{step}"
        arguments = take_arguments(
            *(self._group, consumer, slot, attempt, request),
            waiter=self._waiter,
            ttl_ms=ttl_ms,
            lease_ms=lease_ms,
            revision=revision,
            report=not ttl_ms,
        )
        outcome, *values = self._store.run("take/take", arguments)
        if outcome != b"taken":
            *numbers, fates = values if outcome == b"short" else [*values, ()]
            return BatchReply(outcome.decode(), tuple(numbers), fates=read_fates(fates))
        amount, members, weights, *_ = values
        pending = self._store.client.execute(
            "XPENDING", self._store.keys.stream, self._group, "-", "+", max(amount, 1), slot
        )
        ids = [_seq(entry[0]) for entry in pending]
        order = {int(member): place for place, member in enumerate(members)}
        ids.sort(key=lambda seq: (order.get(seq, 0), seq))
        if len(weights) != len(members) + 1:
            return BatchReply("taken", (), tuple(ids))
        by_id = dict(zip([*map(int, members), 0], weights, strict=True))
        return BatchReply("taken", (), tuple(ids), by_id)

    def read(self, slot: str, count: int) -> tuple[dict[int, bytes | None], dict[int, int]]:
        """Return the payloads that a slot leases, and the first ids of requeued groups, by id.

        A payload is None where the entry was deleted.
        """
        reply = self._store.client.execute(
            *("XREADGROUP", "GROUP", self._group, slot, "COUNT", max(count, 1)),
            *("STREAMS", self._store.keys.stream, "0"),
        )
        raw = reply[0][1] if reply else ()
        return dict(map(parse_entry, raw)), first_ids(raw)

    def assign(
        self, step: int, attempt: int, spec: str, parts: Sequence[tuple[str, Sequence[int]]]
    ) -> None:
        """Deal a leased batch to the ranks, unless it was dealt already or the attempt is over.

        Args:
            step: The step.
            attempt: The attempt in which the batch was leased.
            spec: The request of all ranks.
            parts: Weights and ids of each rank.
        """
        arguments: list[Argument] = [self._group, step, attempt, spec]
        for weights, ids in parts:
            arguments += [weights, len(ids), *ids]
        self._store.run("ranks/assign", arguments)

    def end(self, attempt: int, counts: str) -> None:
        """End an attempt whose time is up, for all ranks; `counts` go into their errors."""
        self._store.run("ranks/end", [self._group, attempt, counts])

    def finish(
        self,
        consumer: str,
        place: RankStep,
        outcome: Outcome,
        ids: Sequence[int],
        read: Callable[[Loss | None], str],
        *,
        reason: Cause,
        samples: int,
    ) -> Request[str]:
        """Return the request that ends a part, or groups of it.

        `read` is given the reason why that cannot be done any more, if so.
        """
        ending: list[Argument] = [self._group, consumer, place.rank, place.step, outcome]
        ending += [*reason.arguments(), samples]

        def outcome_of(reply: Reply) -> str:
            if reply[0] == b"more":  # a page of the step's groups was acknowledged
                *_, reply = self._store.pages("ranks/finish", ending)
            return read(None if reply[0] == b"ok" else reply[1].decode())

        return self._store.request("ranks/finish", [*ending, *ids], outcome_of)

    def leave(self, consumer: str, rank: int) -> None:
        """Note that the process of a rank ends; its parts are kept."""
        self._store.run("ranks/finish", [self._group, consumer, rank, 0, "leave", "", "", 0])

    def wait(self, consumer: str, *, forming: bool) -> None:
        """Block until the ranks are woken, or the rank that forms a step by a full batch."""
        wakes = [f"{consumer}.rank", *([self._waiter] if forming else [])]
        self._store.wait_for_wake(*wakes)


@Reading("the state of ranks")
def _rank_reply(outcome: RankOutcome, values: Sequence[Reply]) -> RankReply:
    if outcome == "part":
        ids, weights = values
        return RankReply(outcome, ids=tuple(map(int, ids)), text=weights.decode())
    if outcome == "ended":
        why, counts, ranks = values
        return RankReply(
            outcome, ranks=tuple(map(int, ranks)), text=why.decode(), counts=counts.decode()
        )
    if outcome == "differs":
        return RankReply(outcome, text=values[0].decode())
    if outcome in ("wait", "held"):
        return RankReply(outcome, int(values[0]), tuple(map(int, values[1])))
    return RankReply(outcome, int(values[0]) if values else 0)


def _seq(entry_id: bytes) -> int:
    return int(entry_id.rpartition(b"-")[2])
