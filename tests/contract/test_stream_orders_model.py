"""Random sequences of operations on indexed tasks against a model in memory, for each order."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar
from uuid import uuid4

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import redrb
from redrb import BatchTimeout, ConfigError, ExperienceStream, Lease, LeaseLost, Status, StoreFull
from redrb.connection import Client
from redrb.stream import Expiry
from redrb.stream.orders import GroupFacts, Order, Prioritized, Score
from redrb.stream.take.cause import Cause
from tests.audit import audit, beats_of_steps, kill_consumer
from tests.samples import numbered

LIMIT = 9
MAX_DELIVERIES = 2

CONSUMERS = {"a1": "a", "a2": "a", "b1": "b"}
POOLS = (Status.COMPLETED, Status.ABORTED, Status.EXPIRED, Status.FAILED)
ENDS = ("ack", "release", "fail", "reject", "expire")


@dataclass(frozen=True)
class Roomy:
    """An order of the test's own: by samples and priority together, most first."""

    name: ClassVar[str] = "roomy"
    sampled: ClassVar[bool] = False

    def score(self, facts: GroupFacts, /) -> Score:
        return -facts.samples - (facts.priority or 0.0)


ORDERS: dict[str, str | Order] = {
    name: name for name in ("fifo", "lifo", "stalest", "freshest", "priority", "uniform")
}
ORDERS |= {"prioritized": Prioritized(alpha=0.5), "roomy": Roomy()}
DRAWN = ("uniform", "prioritized")


@dataclass(frozen=True)
class Setup:
    """Settings of a task."""

    room: str
    eviction: str
    max_staleness: int | None
    max_token_staleness: int | None
    on_expired: str
    max_reads: int

    def options(self, order: str) -> dict[str, Any]:
        return {
            "order": ORDERS[order],
            "limit": LIMIT if self.room == "limit" else None,
            "max_staleness": self.max_staleness,
            "max_token_staleness": self.max_token_staleness,
            "on_expired": self.on_expired,
            "max_reads": self.max_reads,
            "max_deliveries": MAX_DELIVERIES,
            "max_bytes": 10**6,
            "tags": ["score", "source"],
        }


SETUPS = st.builds(
    Setup,
    room=st.sampled_from(["limit", "limit", "endless"]),
    eviction=st.sampled_from(["oldest", "stalest"]),
    max_staleness=st.sampled_from([2, 2, None]),
    max_token_staleness=st.sampled_from([None, 1]),
    on_expired=st.sampled_from(["discard", "keep"]),
    max_reads=st.sampled_from([1, 1, 2, 0]),
)

_VERSIONS = st.none() | st.integers(0, 6)
_NAMES = st.sampled_from(["a", "b"])
_STATUS = st.sampled_from([Status.COMPLETED] * 12 + [*POOLS])
_QUERY = st.sampled_from(
    [None, None, None, None, None, {"score_gt": 0.5}, {"source": "x", "score_lt": 0.7}]
)
_PICKS = st.lists(st.integers(0, 12), max_size=3)
_STEP_OF = {
    "put": st.tuples(
        st.just("put"),
        st.booleans(),
        st.lists(
            st.tuples(_VERSIONS, st.integers(0, 2), st.integers(1, 3)), min_size=1, max_size=4
        ),
        st.sampled_from([None, 0.0, 1.0, 2.5, 9.0]),
        _STATUS,
        st.sampled_from([None, 0.25, 0.75]),
        st.sampled_from([None, "x", "y"]),
    ),
    "take": st.tuples(
        st.just("take"),
        st.sampled_from(["a1", "a1", "a2", "a2", "b1"]),
        st.integers(1, 4),
        st.sampled_from([True, True, False]),
        _STATUS,
        _QUERY,
        st.booleans(),
    ),
    "hoard": st.tuples(st.just("hoard"), st.sampled_from(["a1", "a1", "a2", "b1"])),
    "end": st.tuples(st.just("end"), st.sampled_from(ENDS), st.integers(0, 8), st.integers(0, 3)),
    "give_up": st.tuples(st.just("give_up"), st.integers(0, 8)),
    "ack": st.tuples(st.just("end"), st.just("ack"), st.integers(0, 1), st.sampled_from([0, 0, 1])),
    "move": st.tuples(st.just("move"), _NAMES, _PICKS, st.sampled_from(POOLS)),
    "update_priority": st.tuples(
        st.just("update_priority"), _PICKS, st.sampled_from([0.0, 0.5, 3.0, 20.0])
    ),
    "expire": st.tuples(st.just("expire"), _NAMES, st.integers(0, 9), st.booleans(), st.booleans()),
    "advance": st.tuples(st.just("advance"), st.integers(0, 7)),
    "kill": st.tuples(st.just("kill"), st.sampled_from(["a1", "a2"])),
    "close": st.tuples(st.just("close"), st.sampled_from(sorted(CONSUMERS))),
    "join": st.tuples(st.just("join"), _NAMES, st.sampled_from([None, None, "newest"])),
    "drop": st.tuples(st.just("drop"), _NAMES),
    "clear": st.tuples(st.just("clear")),
}
_OFTEN = {
    "put": 14,
    "hoard": 3,
    "give_up": 2,
    "kill": 2,
    "take": 12,
    "end": 6,
    "ack": 8,
    "move": 4,
    "update_priority": 3,
    "expire": 3,
}
STEPS = st.sampled_from(
    [name for name in _STEP_OF for _ in range(_OFTEN.get(name, 1))],
).flatmap(lambda name: _STEP_OF[name])


@dataclass
class Facts:
    """What the task knows of a group that is stored."""

    number: int
    oldest: int | None
    newest: int | None
    samples: int
    priority: float | None
    status: Status
    score: float | None
    source: str | None

    def matches(self, query: dict[str, Any] | None) -> bool:
        score = math.nan if self.score is None else self.score
        return query is None or (
            score > query.get("score_gt", -1.0)
            and score < query.get("score_lt", 2.0)
            and query.get("source", self.source) == self.source
        )


@dataclass
class Group:
    """What a consumer group should have: the pool of what waits, the consumer of what is leased."""

    waiting: dict[int, Status]
    put: int
    leased: dict[int, str] = field(default_factory=dict)
    moved: dict[int, Status] = field(default_factory=dict)
    notes: dict[int, Expiry] = field(default_factory=dict)
    failed: Counter[int] = field(default_factory=Counter)
    reads: Counter[int] = field(default_factory=Counter)
    counted: Counter[str] = field(default_factory=Counter)

    @property
    def held(self) -> set[int]:
        return {*self.waiting, *self.leased}

    def forget(self, seq: int) -> None:
        self.waiting.pop(seq, None)
        self.leased.pop(seq, None)
        for kind in (self.moved, self.notes, self.failed, self.reads):
            kind.pop(seq, None)


@dataclass
class Held:
    """A lease, whose it is, and which of its groups the model says are held."""

    lease: Lease
    consumer: str
    ids: list[int]


class Model:
    """Applies each step to the streams and to what is kept in memory."""

    def __init__(self, client: Client, order: str, setup: Setup) -> None:
        shared: dict[str, Any] = {
            "task": "math",
            "namespace": uuid4().hex,
            "checks": ["values"],  # groups without a version are among those of the model
            **setup.options(order),
        }
        self.order, self.setup = order, setup
        self.maker = ExperienceStream(client, on_full="error", **shared)
        self.dropping = ExperienceStream(client, on_full=f"drop_{setup.eviction}", **shared)
        self._open = lambda name: ExperienceStream(client, group=CONSUMERS[name], **shared)
        self.streams = {name: self._open(name) for name in CONSUMERS}
        self.prefix = self.maker._task.store.keys.prefix
        self.run = client.execute
        self.numbers = itertools.count()
        self.leases: list[Held] = []
        self.joined: set[str] = set()  # consumers whose stream joins again when the task is new
        self.stale: set[str] = set()  # consumers that have not noticed yet that it is
        self._begin()
        # a server that knows no scripts yet runs a take before the acknowledgement sent with it
        with ExperienceStream(client, "warm", namespace=shared["namespace"]) as other:
            other.put(numbered(0))
            other.take(1, timeout=0).ack()
            other.clear()

    def _begin(self) -> None:
        self.exists = True
        self.version: int | None = None
        self.facts: dict[int, Facts] = {}
        self.groups: dict[str, Group] = {}

    def close(self) -> None:
        for stream in (self.maker, self.dropping, *self.streams.values()):
            stream.close()
        self.maker.clear()

    # Steps

    def put(
        self,
        dropping: bool,
        entries: list[tuple[int | None, int, int]],
        priority: float | None,
        status: Status,
        score: float | None,
        source: str | None,
    ) -> None:
        self.exists = True
        facts = [
            Facts(next(self.numbers), *_span(*entry), priority, status, score, source)
            for entry in entries
        ]
        excess = len(self.facts) + len(facts) - (LIMIT if self.setup.room == "limit" else 10**9)
        free = self.facts.keys() - self._leased()
        if excess > (len(free) if dropping else 0):
            with pytest.raises(StoreFull):
                self._send(dropping, facts)
            if dropping:
                self._evict(len(free))
            return
        ids = self._send(dropping, facts)
        self._evict(excess, keep=ids)
        self._arrive(ids, facts)

    def take(
        self,
        consumer: str,
        count: int,
        fewer: bool,
        status: Status,
        query: dict[str, Any] | None,
        acks: bool,
    ) -> None:
        least = 1 if fewer else count
        query = None if self.order in DRAWN else query  # a draw takes none
        options: dict[str, Any] = {"at_least": least, "status": status, "where": query}
        stream, name = self.streams[consumer], CONSUMERS[consumer]
        if not self.exists:
            self.exists = True
            with pytest.raises(BatchTimeout):
                stream.take(count, timeout=0, **options)
            self._group(name)
            self.stale.discard(consumer)
            return
        self._notice(consumer)
        before = next((held for held in self.leases if held.consumer == consumer), None)
        if acks and before is not None and before.ids:
            options["ack"] = before.lease
            self._ended(before, "ack", before.ids)
        group = self._group(name)
        expired = 0
        if self.version is not None and status is not Status.EXPIRED:
            rules = (self.setup.max_staleness, self.setup.max_token_staleness)
            keep = self.setup.on_expired == "keep"
            expired = self._expire(name, self.version, rules, (status,), keep=keep)
        matching = [seq for seq in self._pool(name, status) if self.facts[seq].matches(query)]
        if len(matching) < least:
            with pytest.raises(BatchTimeout) as caught:
                stream.take(count, timeout=0, **options)
            assert caught.value.available == len(matching)
            assert caught.value.expired == expired
            return
        lease = stream.take(count, timeout=0, **options)
        got, pool = list(lease.ids), self._pool(name, status)
        assert len(got) == min(count, len(matching))
        assert _comes_from(self._tiers(matching), got), (matching, got)
        assert [round(float(items[0].reward or 0)) for items in lease.groups()] == [
            self.facts[seq].number for seq in got
        ]
        if self.order in DRAWN:
            total = sum(map(self._weight, pool))
            assert lease.probabilities == pytest.approx(
                [self._weight(seq) / total if total else 0.0 for seq in got]
            )
        if status is Status.EXPIRED:
            assert lease.expiries == {seq: group.notes.get(seq) for seq in got}
        for seq in got:
            del group.waiting[seq]
            group.leased[seq] = consumer
        self.leases.append(Held(lease, consumer, got))

    def hoard(self, consumer: str) -> None:
        """Take all completed groups, in leases of one group."""
        for _ in range(LIMIT):
            held = len(self.leases)
            self.take(consumer, 1, False, Status.COMPLETED, None, False)
            if len(self.leases) == held:
                break

    def give_up(self, which: int) -> None:
        """The reply of a take did not come: its groups are requeued."""
        if not self.leases:
            return
        held = self.leases.pop(which % len(self.leases))
        if held.ids:
            self._give_back(self.groups[CONSUMERS[held.consumer]], held.ids, counted=False)
        slot = held.lease.parts[0].holder
        slot.give_up()
        slot.consumer._requeue_given_up()

    def end(self, outcome: Any, which: int, parts: int) -> None:
        """End a lease, or its first `parts` groups."""
        if not self.leases:
            return
        held = self.leases[which % len(self.leases)]
        chosen = list(held.lease.ids)[:parts] if parts else list(held.lease.ids)
        if not held.ids:
            with pytest.raises(LeaseLost):
                held.lease._end(outcome, chosen)
            self.leases.remove(held)
            return
        if outcome == "fail" and len(chosen) == len(held.ids):
            with suppress(ZeroDivisionError), held.lease:
                raise ZeroDivisionError
        else:
            held.lease._end(outcome, chosen, Cause("bad"))
        # the reply may have been lost: the same request once more changes nothing
        ends = len(chosen) == len(held.ids)
        request = held.lease.parts[0].holder.end_request(
            outcome, chosen, reason=Cause("bad"), samples=0, ends=ends
        )
        assert request.result() == ""
        self._ended(held, outcome, chosen)

    def move(self, name: str, picks: list[int], status: Status) -> None:
        ids = self._picked(picks)
        found = self.streams[f"{name}1"].move(ids, status)
        if not self.exists or not ids:
            assert found == 0
            return
        group = self._group(name)
        waits = [seq for seq in dict.fromkeys(ids) if seq in group.waiting]
        for seq in waits:
            if group.waiting[seq] is not status:
                group.waiting[seq] = group.moved[seq] = status
                group.notes.pop(seq, None)
        assert found == sum(seq in waits for seq in ids)

    def update_priority(self, picks: list[int], priority: float) -> None:
        ids = self._picked(picks)
        known = [seq for seq in ids if seq in self.facts]
        if self.order in ("fifo", "lifo"):
            with pytest.raises(ConfigError, match="keeps no priorities"):
                self.maker.update_priority(ids, [priority] * len(ids))
            self.exists = True  # it has opened the task again, to see whether it has another order
            return
        assert self.maker.update_priority(ids, [priority] * len(ids)) == len(known)
        self.exists = self.exists or bool(ids)  # it opens the task again
        for seq in known:
            self.facts[seq].priority = priority

    def expire(self, name: str, version: int, keep: bool, more: bool) -> None:
        rules = (
            2 if self.setup.max_staleness is not None or self.order == "stalest" else None,
            self.setup.max_token_staleness,
        )
        stream, statuses = self.streams[f"{name}1"], POOLS[: 2 if more else 1]
        options: dict[str, Any] = {
            "max_staleness": rules[0],
            "max_token_staleness": rules[1],
            "statuses": statuses,
            "on_expired": "keep" if keep else "discard",
        }
        if rules == (None, None):
            with pytest.raises(ConfigError, match="no staleness is given"):
                stream.expire(version, **options)
            return
        found = stream.expire(version, **options)
        if not self.exists:
            assert found == 0
            return
        self._group(name)
        assert found == self._expire(name, version, rules, statuses, keep=keep)

    def advance(self, version: int) -> None:
        if not self.exists:
            assert self.maker.advance(version) == -1
            return
        self.version = max(self.version or 0, version)
        assert self.maker.advance(version) == self.version

    def kill(self, consumer: str) -> None:
        """A consumer's heartbeat stops; the other one of its group takes over."""
        kill_consumer(self.streams[consumer])
        other = {"a1": "a2", "a2": "a1"}[consumer]
        self.streams[other]._consumer.beat()
        while self.streams[other]._consumer._renew().more:
            pass
        if self.exists:
            self._notice(other)
        self._lose(consumer, counted=True)

    def close_consumer(self, consumer: str) -> None:
        self.streams[consumer].close()
        self.streams[consumer] = self._open(consumer)
        self.exists = True  # that has opened the task again
        self.joined.discard(consumer)
        self.stale.discard(consumer)
        self._lose(consumer, counted=False)

    def join(self, name: str, start: str | None) -> None:
        if name in self.groups or not self.groups:
            start = None  # what nobody else needs would be left behind
        self.exists = True
        self.streams[f"{name}1"].join_group(start)
        self.joined.add(f"{name}1")
        self._group(name, start)

    def drop(self, name: str) -> None:
        deleted = self.streams[f"{name}1"].drop_group()
        self.joined.discard(f"{name}1")
        before = len(self.facts)
        group = self.groups.pop(name, None)
        for held in self.leases:
            if CONSUMERS[held.consumer] == name:
                held.ids = []
        if group is not None and self.groups:
            self._forget(group.held)
        assert deleted == before - len(self.facts)

    def clear(self) -> None:
        assert self.maker.clear() == len(self.facts)
        self._begin()
        self.exists = False
        self.stale = set(CONSUMERS)
        for held in self.leases:
            held.ids = []
        left = {
            key.decode().removeprefix(self.prefix) for key in self.run("KEYS", self.prefix + "*")
        }
        assert {key for key in left if not key.startswith("wake:")} <= {"removed"}  # for an hour

    def _notice(self, consumer: str) -> None:
        """A consumer learns that the task is another one, and joins it if it had joined."""
        if consumer in self.stale and consumer in self.joined:
            self._group(CONSUMERS[consumer])
        self.stale.discard(consumer)

    # What should be there after a step

    def check(self) -> None:
        found = audit(self.maker)
        assert found.keys() == self.groups.keys()
        if self.exists:
            members = self.run("HKEYS", f"{self.prefix}facts")
            assert set(map(int, members)) == self.facts.keys()
        stats = self.maker.stats()
        assert stats.stored == len(self.facts)
        for name, group in self.groups.items():
            self._check_group(name, group)
            assert found[name].waiting == group.waiting.keys()
            assert found[name].leased.keys() == group.leased.keys()

    def _check_group(self, name: str, group: Group) -> None:
        stats = self.streams[f"{name}1"].stats()
        counted = group.counted
        assert stats.ledger.as_dict() == {
            "put": group.put,
            "acked": counted["acked"],
            "expired": counted["expired"],
            "filtered": 0,
            "evicted": counted["evicted"],
            "dead": counted["dead"],
            "leased": len(group.leased),
            "waiting": len(group.waiting),
        }
        assert stats.ledger.balanced
        assert stats.reads == counted["reads"]
        expected = dict.fromkeys(Status, 0) | Counter(group.waiting.values())
        assert self.streams[f"{name}1"].counts() == expected
        for kind, own in (("moved", group.moved), ("expiries", group.notes)):
            assert set(map(int, self.run("HKEYS", f"{self.prefix}{kind}:{name}"))) == own.keys()
        for status in POOLS if self.order in DRAWN else ():
            self._check_clock(name if status is Status.COMPLETED else f"{name}:{status}", name)

    def _check_clock(self, pool: str, name: str) -> None:
        """What is next to be drawn lies beyond what was drawn last."""
        clock = float(self.run("HGET", f"{self.prefix}clock:{name}", pool) or 0)
        for _, place in _scored(
            self.run("ZRANGE", f"{self.prefix}ready:{pool}", 0, 0, "WITHSCORES")
        ):
            assert place >= clock, pool

    # What steps have in common

    def _leased(self) -> set[int]:
        return {seq for group in self.groups.values() for seq in group.leased}

    def _picked(self, picks: list[int]) -> list[int]:
        known = [*sorted(self.facts), 10**6]
        return [known[pick % len(known)] for pick in picks]

    def _weight(self, seq: int) -> float:
        priority = self.facts[seq].priority
        return 1.0 if self.order == "uniform" or priority is None else math.sqrt(priority)

    def _place(self, seq: int) -> tuple[float, int]:
        facts = self.facts[seq]
        oldest, priority = facts.oldest, facts.priority or 0.0
        score = {
            "fifo": 0.0,
            "lifo": -seq,
            "stalest": math.inf if oldest is None else oldest,
            "freshest": math.inf if oldest is None else -oldest,
            "priority": -priority,
            "roomy": -facts.samples - priority,
        }
        return score[self.order], seq

    def _tiers(self, seqs: Iterable[int]) -> list[set[int]]:
        """Return sets of which each must be used up before the next one is touched."""
        if self.order not in DRAWN:
            return [{seq} for seq in sorted(seqs, key=self._place)]
        drawn = {seq for seq in seqs if self._weight(seq)}
        return [drawn, set(seqs) - drawn]

    def _pool(self, name: str, status: Status) -> list[int]:
        return [seq for seq, own in self.groups[name].waiting.items() if own is status]

    def _send(self, dropping: bool, facts: Sequence[Facts]) -> tuple[int, ...]:
        first = facts[0]
        tags = {"score": first.score, "source": first.source}
        return (self.dropping if dropping else self.maker).put_many(
            [_items(each) for each in facts],
            priority=first.priority,
            status=first.status,
            tags={name: value for name, value in tags.items() if value is not None},
        )

    def _arrive(self, ids: Sequence[int], arrived: Sequence[Facts]) -> None:
        rules = (self.setup.max_staleness, self.setup.max_token_staleness)
        note = Expiry(self.version or 0, *rules)
        for group in self.groups.values():
            group.put += len(ids)
        for seq, facts in zip(ids, arrived, strict=True):
            stale = self.version is not None and _overdue(facts, self.version, rules)
            if stale and facts.status is not Status.EXPIRED:
                if self.setup.on_expired == "discard":
                    for group in self.groups.values():
                        group.counted["expired"] += 1
                    continue
                facts.status = Status.EXPIRED
                for group in self.groups.values():
                    group.notes[seq] = note
            self.facts[seq] = facts
            for group in self.groups.values():
                group.waiting[seq] = facts.status

    def _evict(self, excess: int, keep: Collection[int] = ()) -> None:
        """Find what was evicted, and check that it was its turn."""
        if excess <= 0:
            return
        now = set(map(int, self.run("HKEYS", f"{self.prefix}facts")))
        gone = self.facts.keys() - now
        free = self.facts.keys() - self._leased() - set(keep)
        assert len(gone) == min(excess, len(free))
        # with several consumer groups it is one of them that says which is last
        firsts: list[str | None] = [*sorted(self.groups)] or [None]
        assert any(_comes_from(self._victims(first, free), gone) for first in firsts), gone
        for group in self.groups.values():
            group.counted["evicted"] += len(gone & group.waiting.keys())
            for seq in gone:
                group.forget(seq)
        for seq in gone:
            del self.facts[seq]

    def _victims(self, first: str | None, free: set[int]) -> list[set[int]]:
        tiers: list[set[int]] = []
        if first is not None and self.setup.eviction != "oldest":
            pool = [seq for seq in self._pool(first, Status.COMPLETED) if seq in free]
            tiers = [{seq} for seq in self._by_version(pool)]
        rest = free.difference(*tiers)
        return [*tiers, *({seq} for seq in sorted(rest))]

    def _by_version(self, pool: list[int]) -> list[int]:
        if self.order == "stalest":
            return sorted(pool, key=self._place)
        if self.setup.max_staleness is None:
            return []
        known = [(self.facts[seq].oldest, seq) for seq in pool]
        return [seq for _, seq in sorted(pair for pair in known if pair[0] is not None)]

    def _expire(
        self,
        name: str,
        version: int,
        rules: tuple[int | None, int | None],
        statuses: Sequence[Status],
        *,
        keep: bool,
    ) -> int:
        if self.setup.max_staleness is None and self.order != "stalest":
            rules = (None, rules[1])
        group, expired = self.groups[name], []
        for status in statuses:
            expired += [
                seq
                for seq in self._pool(name, status)
                if _overdue(self.facts[seq], version, rules)
                and not (keep and status is Status.EXPIRED)
            ]
        for seq in expired:
            if keep:
                group.waiting[seq] = group.moved[seq] = Status.EXPIRED
                group.notes[seq] = Expiry(version, *rules)
            else:
                group.counted["expired"] += 1
                group.forget(seq)
        if not keep:
            self._forget(expired)
        return len(expired)

    def _ended(self, held: Held, outcome: str, chosen: Sequence[int]) -> None:
        group = self.groups[CONSUMERS[held.consumer]]
        chosen = list(chosen)
        if outcome in ("release", "fail"):
            self._give_back(group, chosen, counted=outcome == "fail")
        else:
            self._done(group, chosen, outcome)
        held.ids = [seq for seq in held.ids if seq not in chosen]
        if not held.ids:
            self.leases.remove(held)

    def _done(self, group: Group, chosen: Sequence[int], outcome: str) -> None:
        over = []
        for seq in chosen:
            group.reads[seq] += outcome == "ack"
            again = self.setup.max_reads == 0 or group.reads[seq] < self.setup.max_reads
            if outcome == "ack" and again:
                group.failed.pop(seq, None)
                group.counted["reads"] += 1
                self._wait(group, seq)
                continue
            over.append(seq)
            group.forget(seq)
            group.counted[{"ack": "acked", "reject": "dead", "expire": "expired"}[outcome]] += 1
        self._forget(over)

    def _give_back(self, group: Group, ids: Sequence[int], *, counted: bool) -> None:
        for seq in ids:
            group.failed[seq] += counted
            if counted and group.failed[seq] >= MAX_DELIVERIES:
                group.counted["dead"] += 1
                group.forget(seq)
                self._forget([seq])
            else:
                self._wait(group, seq)

    def _wait(self, group: Group, seq: int) -> None:
        del group.leased[seq]
        group.waiting[seq] = group.moved.get(seq, self.facts[seq].status)

    def _forget(self, ids: Collection[int]) -> None:
        """Delete what no group needs any more."""
        for seq in set(ids).difference(*(group.held for group in self.groups.values())):
            del self.facts[seq]

    def _lose(self, consumer: str, *, counted: bool) -> None:
        group = self.groups.get(CONSUMERS[consumer])
        for held in self.leases:
            if held.consumer == consumer:
                if group is not None:
                    self._give_back(group, held.ids, counted=counted)
                held.ids = []

    def _group(self, name: str, start: str | None = None) -> Group:
        if name not in self.groups:
            found = self.facts if start is None else ()
            waiting = {seq: self.facts[seq].status for seq in found}
            self.groups[name] = Group(waiting, put=len(waiting))
        return self.groups[name]


def _span(oldest: int | None, spread: int, samples: int) -> tuple[int | None, int | None, int]:
    return oldest, None if oldest is None else oldest + spread, samples


def _items(facts: Facts) -> list[Any]:
    changes: dict[str, Any] = {}
    if facts.oldest is not None:
        changes["token_versions"] = torch.tensor([facts.oldest, facts.newest])
    return [numbered(facts.number, **changes)] * facts.samples


def _overdue(facts: Facts, version: int, rules: tuple[int | None, int | None]) -> bool:
    ages = ((facts.oldest, rules[0]), (facts.newest, rules[1]))
    return any(rule is not None and at is not None and version - at > rule for at, rule in ages)


def _comes_from(tiers: list[set[int]], got: Collection[int]) -> bool:
    """Return whether `got` has no group twice, and each tier was used up before the next one."""
    left = list(got)
    for tier in tiers:
        if isinstance(got, set):
            part = tier & got if len(tier) <= len(left) else set(left)
            left = [seq for seq in left if seq not in part]
        else:
            part, left = set(left[: len(tier)]), left[len(tier) :]
        if not part <= tier or (left and part != tier):
            return False
    return not left and len(set(got)) == len(got)


def _scored(flat: list[Any]) -> list[tuple[int, float]]:
    pairs = (
        flat
        if flat and isinstance(flat[0], list | tuple)
        else zip(flat[::2], flat[1::2], strict=True)
    )
    return [(int(member), float(score)) for member, score in pairs]


SMALL = {
    "taken_over": 3,
    "slots": 2,
    "dead_consumers": 1,
    "pending": 2,
    "pending_between": 2,
    "ended_of_group": 2,
    "copied_bytes": 1,
    "expired": 2,
    "filled": 2,
    "sorted": 2,
}
"""Pages that are passed by a few leases of a few groups."""


def run(client: Client, order: str, setup: Setup, steps: list[tuple[Any, ...]]) -> None:
    stalest = setup.eviction == "stalest" and order != "stalest"
    if (order == "fifo" or stalest) and setup.max_staleness is None:
        setup = Setup(**{**setup.__dict__, "max_staleness": 2})
    model = Model(client, order, setup)
    with beats_of_steps():
        try:
            for name, *arguments in steps:
                getattr(model, "close_consumer" if name == "close" else name)(*arguments)
                model.check()
        finally:
            model.close()


_SETTINGS: dict[str, Any] = {
    "deadline": None,
    "derandomize": True,
    "suppress_health_check": [HealthCheck.function_scoped_fixture],
}
_EXAMPLES = {"setup": SETUPS, "steps": st.lists(STEPS, min_size=15, max_size=40)}


@pytest.mark.long
@pytest.mark.timeout(1200)  # beside busy processes
@pytest.mark.parametrize("order", sorted(ORDERS))
@given(**_EXAMPLES)
@settings(max_examples=5, **_SETTINGS)
def test_every_sequence_of_operations_agrees_with_the_model(client, pages, order, setup, steps):
    pages(**SMALL)
    run(client, order, setup, steps)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("order", sorted(ORDERS))
@given(**_EXAMPLES)
@settings(max_examples=100, **_SETTINGS)
def test_many_sequences_of_operations_agree_with_the_model(real_url, pages, order, setup, steps):
    pages(**SMALL)
    with redrb.connect(real_url, retry_s=10) as client:
        run(client, order, setup, steps)
