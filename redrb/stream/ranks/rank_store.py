"""What Redis does for ranks: a typed function for each of their scripts, safe to repeat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from redrb.connection.transport import Argument, Reply
from redrb.experience import Status
from redrb.stream.take.scripts import Outcome
from redrb.stream.task.entries import ID_BASE
from redrb.stream.task.store import TaskStore

CREW = "ranks"
"""The consumer that leases the parts of ranks, see `redrb/lua/include/ranks.lua`."""

MOST_AHEAD = 64
"""Steps that may have parts and not be acknowledged by all ranks."""


@dataclass(frozen=True, slots=True)
class Place:
    """Which part a rank asks for.

    Attributes:
        rank: Of 0 to `world_size - 1`.
        world_size: How many ranks there are.
        step: Which batch.
    """

    rank: int
    world_size: int
    step: int

    @property
    def slot(self) -> str:
        """The slot to which its part is leased."""
        return f"{CREW}/{self.step}.{self.rank}"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a rank that asked is told; see `redrb/lua/ranks/take.lua`.

    Attributes:
        outcome: Which case.
        number: Its attempt, step, size or amount.
        ranks: Ranks it is about; of "part" the ids of its groups.
        text: Of "part" its weights, of "ended" why and of "differs" what others ask for.
        told: Of "ended" what was missing.
    """

    outcome: str
    number: int = 0
    ranks: tuple[int, ...] = ()
    text: str = ""
    told: str = ""


@dataclass(frozen=True, slots=True)
class Found:
    """What became of an attempt to lease a step's batch.

    Attributes:
        outcome: As that of `take`.
        amounts: Groups waiting, producers waiting for room, groups expired, groups with another
            status; or the limit.
        ids: Of the groups that were leased, in the task's order.
        weights: Weight by id, and under 0 that of all that waited; of an order that draws.
    """

    outcome: str
    amounts: tuple[int, ...] = ()
    ids: tuple[int, ...] = ()
    weights: dict[int, bytes] | None = None


class CrewStore:
    """What the ranks of one consumer group do in Redis."""

    def __init__(self, store: TaskStore, group: str) -> None:
        self._store = store
        self._group = group
        self._queued = f"{CREW}:{group}"

    def ask(
        self,
        consumer: str,
        place: Place,
        spec: str,
        *,
        attempt: int,
        joined: bool,
        last: bool,
        lease_ms: int,
        retry_s: float | None,
    ) -> Answer:
        """Ask for a part."""
        arguments: list[Argument] = [self._group, consumer, place.rank, place.world_size]
        arguments += [place.step, spec, attempt, int(joined), int(last), lease_ms, MOST_AHEAD]
        outcome, *told = self._store.run("ranks/take", arguments, retry_s=retry_s)
        return _answer(outcome.decode(), told)

    def lease_batch(
        self,
        consumer: str,
        step: int,
        attempt: int,
        *,
        count: int,
        least: int,
        status: Status,
        where: str,
        ttl_ms: int,
        lease_ms: int,
        retry_s: float | None,
    ) -> Found:
        """Lease a step's batch, or queue for it; repeated in one attempt it finds the same."""
        slot = f"{CREW}/{step}"
        arguments: list[Argument] = [self._group, consumer, slot, attempt, count, least]
        arguments += [self._queued, ttl_ms, lease_ms, status, where]
        outcome, *told = self._store.run("take/take", arguments, retry_s=retry_s)
        if outcome != b"taken":
            return Found(outcome.decode(), tuple(told))
        amount, members, weights = told
        pending = self._store.client.execute(
            "XPENDING", self._store.keys.stream, self._group, "-", "+", max(amount, 1), slot
        )
        held = [_seq(entry[0]) for entry in pending]
        order = {int(member): place for place, member in enumerate(members)}
        held.sort(key=lambda seq: (order.get(seq, 0), seq))
        if len(weights) != len(members) + 1:
            return Found("taken", (), tuple(held))
        by_id = dict(zip([*map(int, members), 0], weights, strict=True))
        return Found("taken", (), tuple(held), by_id)

    def read(self, slot: str, count: int) -> dict[int, bytes | None]:
        """Return the bytes of what a slot holds, by id; None where they are gone."""
        reply = self._store.client.execute(
            *("XREADGROUP", "GROUP", self._group, slot, "COUNT", max(count, 1)),
            *("STREAMS", self._store.keys.stream, "0"),
        )
        found: dict[int, bytes | None] = {}
        for at, fields in reply[0][1] if reply else ():
            whole = bool(fields) and len(fields) == 2 and fields[0] == b"g"
            found[_seq(at)] = fields[1] if whole else None
        return found

    def assign(
        self, step: int, attempt: int, spec: str, parts: Sequence[tuple[str, Sequence[int]]]
    ) -> None:
        """Deal a leased batch to the ranks, unless somebody has, or the attempt is over.

        Args:
            step: Which.
            attempt: In which it was leased.
            spec: What was asked for.
            parts: Weights and ids of each rank.
        """
        arguments: list[Argument] = [self._group, step, attempt, spec]
        for weights, ids in parts:
            arguments += [weights, len(ids), *ids]
        self._store.run("ranks/assign", arguments)

    def end(self, attempt: int, told: str) -> None:
        """End an attempt whose time is up, for all ranks."""
        self._store.run("ranks/end", [self._group, attempt, told])

    def finish(
        self,
        consumer: str,
        place: Place,
        outcome: Outcome | str,
        ids: Sequence[int] = (),
        *,
        reason: str = "",
        samples: int = 0,
    ) -> bool:
        """End a part or some of it; False when this process has it no more."""
        arguments: list[Argument] = [self._group, consumer, place.rank, place.step, outcome]
        reply = self._store.run("ranks/finish", [*arguments, reason, samples, *ids])
        return bool(reply[0] == b"ok")

    def wait(self, consumer: str, seconds: float, *, forming: bool) -> None:
        """Block until the ranks are woken, or the one that forms a step by a full batch."""
        wakes = [f"{consumer}.rank", *([self._queued] if forming else [])]
        self._store.wait_for_wake(seconds, *wakes)


def _answer(outcome: str, told: Sequence[Reply]) -> Answer:
    if outcome == "part":
        return Answer(outcome, ranks=tuple(map(int, told[0])), text=told[1].decode())
    if outcome == "ended":
        why, amounts, ranks = told
        return Answer(outcome, 0, tuple(map(int, ranks)), why.decode(), amounts.decode())
    if outcome == "differs":
        return Answer(outcome, text=told[0].decode())
    if outcome in ("wait", "held"):
        return Answer(outcome, int(told[0]), tuple(map(int, told[1])))
    return Answer(outcome, int(told[0]) if told else 0)


def _seq(entry_id: bytes) -> int:
    return int(entry_id.decode().removeprefix(ID_BASE))
