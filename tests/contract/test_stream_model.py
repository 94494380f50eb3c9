"""Random sequences of operations against a model in memory, with an audit after every step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from redrb import BatchTimeout, ExperienceStream, Lease, LeaseLost, StoreFull
from redrb.connection import Client
from redrb.stream.take.cause import Cause
from redrb.stream.task.dead_letters import find_letters
from tests.audit import audit, beats_of_steps
from tests.samples import numbered, numbers

LIMIT = 20
MAX_DELIVERIES = 2
MAX_DEAD = 5

CONSUMERS = {"a1": "a", "a2": "a", "b1": "b"}
ENDS = ("ack", "release", "fail", "reject")
_TAKERS = st.sampled_from(sorted(CONSUMERS))
_PEERS = st.sampled_from(["a1", "a2"])
_BURIERS = st.sampled_from(["a1", "b1"])
_GROUPS = st.sampled_from(["a", "b"])
_STEP_OF: dict[str, tuple[int, Any]] = {  # how often, and its arguments
    "put": (3, (st.sampled_from([1, 2, 4, 9, 14]),)),
    "put_dropping": (1, (st.sampled_from([1, 2, 4, 9]),)),
    "take": (3, (_TAKERS, st.sampled_from([1, 2, 3, 4, 9]))),
    "hoard": (2, (st.sampled_from(["a1", "a1", "a2", "b1"]), st.integers(1, 2))),
    "end": (4, (st.sampled_from(ENDS), st.integers(0, 19), st.integers(0, 5))),
    "stop": (2, (_PEERS, st.integers(1, 3))),
    "go_on": (1, (_PEERS,)),
    "give_up": (2, (_TAKERS, st.sampled_from([0, 0, 1, 3]))),
    "bury": (2, (_BURIERS, st.integers(1, 4))),
    "requeue": (2, (_GROUPS, st.integers(0, 1), st.integers(1, 3))),
    "drop_letter": (1, (_GROUPS, st.integers(0, 3))),
    "kill": (2, (_PEERS,)),
    "close": (2, (_TAKERS,)),
    "drop": (1, (_GROUPS,)),
    "join": (1, (_GROUPS,)),
    "clear": (1, ()),
}
STEPS = st.sampled_from(
    [name for name, (often, _) in _STEP_OF.items() for _ in range(often)],
).flatmap(lambda name: st.tuples(st.just(name), *_STEP_OF[name][1]))


@dataclass
class Group:
    """What a consumer group should have.

    Attributes:
        leased: Id -> slot of the lease.
        lost: Ids of lost leases that are not requeued yet: others take them over a page at a time.
    """

    waiting: list[int]
    put: int
    leased: dict[int, str] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    failed: dict[int, int] = field(default_factory=dict)
    acked: int = 0
    evicted: int = 0
    dead: int = 0
    letters: list[int] = field(default_factory=list)

    def bury(self, seq: int) -> None:
        self.dead += 1
        self.letters.append(seq)

    def give_back(self, ids: list[int], *, counted: bool) -> None:
        for seq in ids:
            del self.leased[seq]
            failed = self.failed.get(seq, 0) + counted
            if counted and failed >= MAX_DELIVERIES:
                self.failed.pop(seq, None)
                self.bury(seq)
                continue
            if counted:
                self.failed[seq] = failed
            self.waiting.append(seq)


@dataclass
class Held:
    """A lease, whose it is, and which of its groups the model says are held."""

    lease: Lease
    consumer: str
    ids: list[int]


class Model:
    """Applies each step to the streams and to lists in memory."""

    def __init__(self, client: Client) -> None:
        shared: dict[str, Any] = {
            "task": "math",
            "namespace": uuid4().hex,
            "limit": LIMIT,
            "max_deliveries": MAX_DELIVERIES,
            "max_dead": MAX_DEAD,
            "max_bytes": 10**6,
            "lease_ms": 600_000,
        }
        self.maker = ExperienceStream(client, on_full="error", **shared)
        self.dropping = ExperienceStream(client, on_full="drop_oldest", **shared)
        self.reopen = {
            name: partial(ExperienceStream, client, group=group, **shared)
            for name, group in CONSUMERS.items()
        }
        self.streams = {name: reopen() for name, reopen in self.reopen.items()}
        self.stored: set[int] = set()
        self.groups: dict[str, Group] = {}
        self.leases: list[Held] = []
        self.numbers = itertools.count()
        self.number_of: dict[int, int] = {}
        self.letters: list[tuple[str, int]] = []
        self.letters_dropped = 0
        self.cleared = False
        self.joined: set[str] = set()  # consumers whose stream joins again when the task is new
        self.stale: set[str] = set()  # consumers that have not noticed yet that it is
        self.stopped: set[str] = set()  # consumers whose leases others may take over

    def close(self) -> None:
        for stream in (self.maker, self.dropping, *self.streams.values()):
            stream.close()
        self.maker.clear()

    def put(self, count: int) -> None:
        if len(self.stored) + count > LIMIT:
            with pytest.raises(StoreFull):
                self._send(self.maker, count)
            return
        self._stored(self._send(self.maker, count))

    def put_dropping(self, count: int) -> None:
        excess = len(self.stored) + count - LIMIT
        leased = set().union(*(group.leased for group in self.groups.values()))
        victims = sorted(self.stored - leased)
        if excess > len(victims):
            with pytest.raises(StoreFull):
                self._send(self.dropping, count)
            self._evicted(victims)
            return
        ids = self._send(self.dropping, count)
        self._evicted(victims[: max(excess, 0)])
        self._stored(ids)

    def take(self, consumer: str, count: int) -> None:
        stream = self.streams[consumer]
        if self.cleared:
            self.cleared = False
            with pytest.raises(BatchTimeout):
                stream.take(count, timeout=0)
            self._group(CONSUMERS[consumer])
            self.stale.discard(consumer)
            return
        self._notice(consumer)
        group = self._group(CONSUMERS[consumer])
        lease, available = None, 0
        try:
            lease = stream.take(count, timeout=0)
        except BatchTimeout as short:
            available = short.available
        if lease is None:
            self._see_what_was_taken_over(CONSUMERS[consumer])
            assert available == len(group.waiting) < count
            return
        self._see_what_was_taken_over(CONSUMERS[consumer], taken=lease.ids)
        expected, group.waiting = group.waiting[:count], group.waiting[count:]
        assert list(lease.ids) == expected
        assert numbers(lease) == [self.number_of[seq] for seq in expected]
        group.leased.update(dict.fromkeys(expected, lease.parts[0].holder.name))
        self.leases.append(Held(lease, consumer, expected))

    def give_up(self, consumer: str, count: int) -> None:
        """The reply of a take does not come: its groups, if it has arrived, are requeued."""
        held = len(self.leases)
        if count:
            self.take(consumer, count)
        if len(self.leases) > held:
            taken = self.leases.pop()
            self.groups[CONSUMERS[consumer]].give_back(taken.ids, counted=False)
            slot = taken.lease.parts[0].holder
        else:
            slot = self.streams[consumer]._consumer.occupy()
        slot.give_up()
        slot.consumer._requeue_given_up()

    def hoard(self, consumer: str, size: int) -> None:
        """Take all that waits, in many leases."""
        for _ in range(LIMIT // size):
            held = len(self.leases)
            self.take(consumer, size)
            if len(self.leases) == held:
                break

    def end(self, outcome: Any, which: int, parts: int) -> None:
        """End a lease, or its first `parts` groups."""
        if not self.leases:
            return
        held = self.leases[which % len(self.leases)]
        chosen = list(held.lease.ids)[:parts] if parts else list(held.lease.ids)
        if not held.ids:
            with pytest.raises(LeaseLost) as lost:
                held.lease._end(outcome, chosen)
            assert set(chosen) <= set(lost.value.ids)
            self.leases.remove(held)
            return
        held.lease._end(outcome, chosen, Cause("bad"))
        group = self.groups[CONSUMERS[held.consumer]]
        if outcome in ("release", "fail"):
            group.give_back(chosen, counted=outcome == "fail")
        else:
            for seq in chosen:
                del group.leased[seq]
                group.failed.pop(seq, None)
                if outcome == "reject":
                    group.bury(seq)
            group.acked += len(chosen) * (outcome == "ack")
        held.ids = [seq for seq in held.ids if seq not in chosen]
        if not held.ids:
            self.leases.remove(held)

    def bury(self, consumer: str, count: int) -> None:
        """Take groups, which are put if there are too few, and reject them."""
        group = self.groups.get(CONSUMERS[consumer])
        if group is None or len(group.waiting) < count:
            self.put(count)
        held = len(self.leases)
        self.take(consumer, count)
        if len(self.leases) > held:
            self.end("reject", held, 0)

    def requeue(self, name: str, first: int, count: int) -> None:
        """Requeue letters of a group, and one that does not exist."""
        chosen = self._letters_of(name)[first : first + count]
        ids = self.streams[f"{name}1"].requeue([*chosen, 10**6])
        assert list(ids) == sorted(chosen)
        assert list(ids.values()) == sorted({*ids.values()} - self.stored)  # new ones
        for old, seq in ids.items():
            group = self.groups[name]
            group.dead -= 1
            group.letters.remove(old)
            group.waiting.append(seq)
            self.letters.remove((name, old))
            self.number_of[seq] = self.number_of[old]
            self.stored.add(seq)

    def drop_letter(self, name: str, which: int) -> None:
        chosen = self._letters_of(name)[which : which + 1]
        assert self.streams[f"{name}1"].drop_dead_letters(chosen) == len(chosen)
        self._drop_letters(name, chosen)

    def kill(self, consumer: str) -> None:
        """A consumer's heartbeat stops; the other one of its group takes all over."""
        self.stop(consumer, LIMIT)
        if "a" in self.groups:
            name = self.streams[consumer]._consumer.name
            assert all(slot.rpartition("/")[0] != name for slot in self.groups["a"].leased.values())
            assert not self.groups["a"].lost

    def stop(self, consumer: str, beats: int) -> None:
        """A consumer is stopped for longer than its lease; the other one beats so often."""
        other = {"a1": "a2", "a2": "a1"}[consumer]
        self.go_on(other)
        store, name = self.maker._task.store, self.streams[consumer]._consumer.name
        store.client.execute("ZADD", f"{store.keys.prefix}consumers:a", "XX", 1, name)
        self.stopped.add(consumer)
        for _ in range(beats):
            if not self.streams[other]._consumer._renew().more:
                break
        self._see_what_was_taken_over("a")

    def go_on(self, consumer: str) -> None:
        """A consumer that was stopped, or not, beats again; Redis was not away."""
        stream = self.streams[consumer]
        if stream._consumer._renew().outcome == "anew":
            stream._consumer.beat()
        if not self.cleared:
            self._notice(consumer)
        self._see_what_was_taken_over("a")
        self.stopped.discard(consumer)
        prefix = self.maker._task.store.keys.prefix
        self.maker._task.store.client.execute("DEL", f"{prefix}spared:a")

    def close_consumer(self, consumer: str) -> None:
        self.streams[consumer].close()
        self.streams[consumer] = self.reopen[consumer]()
        self.joined.discard(consumer)
        self.stale.discard(consumer)
        self.cleared = False  # that has opened the task again
        self._lose(consumer)
        self._see_what_was_taken_over(CONSUMERS[consumer])

    def drop(self, name: str) -> None:
        before = len(self.stored)
        self.streams[f"{name}1"].drop_group()
        self.joined.discard(f"{name}1")
        if name in self.groups:
            self._drop_letters(name, self._letters_of(name))
        self.groups.pop(name, None)
        for held in self.leases:
            if CONSUMERS[held.consumer] == name:
                held.ids = []
        self._forget()
        assert len(self.stored) <= before

    def join(self, name: str) -> None:
        self.streams[f"{name}1"].join_group()
        self.joined.add(f"{name}1")
        self.cleared = False
        self._group(name)

    def clear(self) -> None:
        assert self.maker.clear() == len(self.stored)
        self.stored, self.groups, self.cleared = set(), {}, True
        self.letters, self.letters_dropped = [], 0
        self.stale = set(CONSUMERS)
        for held in self.leases:
            held.ids = []

    def check(self) -> None:
        self._forget()
        found = audit(self.maker)
        assert found.keys() == self.groups.keys()
        stats = self.maker.stats()
        assert stats.stored == len(self.stored)
        self._note_letters()
        assert (stats.dead_letters, stats.dead_dropped) == (len(self.letters), self.letters_dropped)
        for name, group in self.groups.items():
            ledger = self.streams[f"{name}1"].stats().ledger
            assert ledger.as_dict() == {
                "put": group.put,
                "acked": group.acked,
                "expired": 0,
                "filtered": 0,
                "evicted": group.evicted,
                "dead": group.dead,
                "leased": len(group.leased),
                "waiting": len(group.waiting),
            }
            assert ledger.balanced
            group.waiting.sort()
            assert found[name].waiting == set(group.waiting)
            assert found[name].leased.keys() == group.leased.keys()

    def _note_letters(self) -> None:
        """Check that new letters came after the old ones, and that the oldest ones were deleted.

        Several letters of one step may come in any order.
        """
        here = [(name, seq) for name, group in self.groups.items() for seq in group.letters]
        new = set(here) - set(self.letters)
        found = [(letter.group, letter.id) for letter in find_letters(self.maker._store)][::-1]
        kept = max(MAX_DEAD - len(new), 0)
        old = self.letters[-kept:] if kept else []
        assert found[: len(old)] == old
        assert set(found[len(old) :]) <= new
        assert len(found) == min(MAX_DEAD, len(self.letters) + len(new))
        self.letters_dropped += len(here) - len(found)
        for name, group in self.groups.items():
            group.letters = [seq for where, seq in found if where == name]
        self.letters = found

    def _letters_of(self, name: str) -> list[int]:
        return [seq for where, seq in self.letters if where == name]

    def _drop_letters(self, name: str, ids: list[int]) -> None:
        self.letters_dropped += len(ids)
        self.letters = [each for each in self.letters if each not in [(name, seq) for seq in ids]]
        group = self.groups.get(name)
        if group is not None:
            group.letters = [seq for seq in group.letters if seq not in ids]

    def _send(self, stream: ExperienceStream, count: int) -> tuple[int, ...]:
        self.cleared = False
        numbers = [next(self.numbers) for _ in range(count)]
        ids = stream.put_many([[numbered(number)] for number in numbers])
        self.number_of.update(zip(ids, numbers, strict=True))
        return ids

    def _stored(self, ids: tuple[int, ...]) -> None:
        self.stored.update(ids)
        for group in self.groups.values():
            group.waiting += ids
            group.put += len(ids)

    def _evicted(self, victims: list[int]) -> None:
        self.stored.difference_update(victims)
        for group in self.groups.values():
            mine = set(group.waiting) & set(victims)
            group.evicted += len(mine)
            group.waiting = [seq for seq in group.waiting if seq not in mine]
            for seq in mine:
                group.failed.pop(seq, None)

    def _see_what_was_taken_over(self, name: str, taken: Sequence[int] = ()) -> None:
        """Note leases that their consumers have lost, and which of their groups were requeued.

        That goes by pages, so the model asks Redis how far it is.

        Args:
            name: The consumer group.
            taken: Groups that a consumer has just taken, and the model does not know it yet.
        """
        group = self.groups.get(name)
        if group is None or not (group.lost or self.stopped):
            return
        store = self.maker._task.store
        ask, prefix = store.client.execute, store.keys.prefix
        for held in self.leases:
            if held.consumer in self.stopped and CONSUMERS[held.consumer] == name and held.ids:
                holder = held.lease.parts[0].holder
                token = ask("HGET", f"{prefix}leases:{name}", holder.name)
                if token is None or token.decode() not in (holder.token, f"{holder.token} part"):
                    group.lost.update(held.ids)
                    held.ids = []
        found = audit(self.maker)[name]
        gone = {seq for seq, slot in group.leased.items() if found.leased.get(seq) != slot}
        gone |= set(taken) & group.leased.keys()
        assert gone <= group.lost, "a group was requeued whose lease is not lost"
        group.lost -= gone
        failed = ask("HGETALL", f"{prefix}deliveries:{name}")
        counted = dict(zip(map(int, failed[::2]), map(int, failed[1::2]), strict=True))
        for seq in sorted(gone):
            buried = seq not in found.waiting and seq not in found.leased
            more = counted.get(seq, 0) - group.failed.get(seq, 0)
            assert buried or more in (0, 1)
            group.give_back([seq], counted=buried or more == 1)
        group.waiting.sort()

    def _lose(self, consumer: str) -> None:
        group = self.groups.get(CONSUMERS[consumer])
        for held in self.leases:
            if held.consumer == consumer:
                if group is not None:
                    group.give_back(held.ids, counted=False)
                held.ids = []

    def _notice(self, consumer: str) -> None:
        """A consumer learns that the task is another one, and joins it if it had joined."""
        if consumer in self.stale and consumer in self.joined:
            self._group(CONSUMERS[consumer])
        self.stale.discard(consumer)

    def _group(self, name: str) -> Group:
        self._forget()
        if name not in self.groups:
            self.groups[name] = Group(sorted(self.stored), put=len(self.stored))
        return self.groups[name]

    def _forget(self) -> None:
        """Delete what no group needs."""
        if self.groups:
            needed = (set(group.waiting) | group.leased.keys() for group in self.groups.values())
            self.stored &= set().union(*needed)


def run(client: Client, steps: list[tuple[Any, ...]]) -> None:
    model = Model(client)
    try:
        for name, *arguments in steps:
            getattr(model, "close_consumer" if name == "close" else name)(*arguments)
            model.check()
    finally:
        model.close()


SMALL = {
    "taken_over": 3,
    "slots": 2,
    "dead_consumers": 1,
    "pending": 2,
    "pending_between": 2,
    "arguments": 4,
    "ended_of_group": 2,
    "candidates_leased": 2,
    "copied_bytes": 1,
}
"""Pages that are passed by a few leases of a few groups."""


@given(st.lists(STEPS, min_size=15, max_size=40))
@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_every_sequence_of_operations_agrees_with_the_model(client, pages, steps):
    pages(**SMALL)
    with beats_of_steps():
        run(client, steps)
