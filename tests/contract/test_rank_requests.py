"""Each request of a rank may be repeated, and each rank may start again before and after each."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

import pytest

from redrb.stream.ranks.calls import AskRead, AskStep, StepReply, Unread
from redrb.stream.task.store import TaskStore

NAMES = itertools.count()
Waiter = str
"""What a process waits for at a point where others go on; "" if it does not wait."""
Asking = Iterator[Waiter]


@dataclass
class Job:
    """Ranks whose requests are done one at a time, in an order that `random` chooses.

    Attributes:
        lost: Whether replies get lost: the client repeats the request, or the process asks anew.
        ahead: Decisions of rank 0 before it acknowledges one.
        read: Ranks of whom Redis knows that they have read a decision.
        arrived: Parts that a process has got.
        keeps: Whether Redis has kept its keys: otherwise nobody knows who has read.
        looks: How often all look again when nobody is woken, as their wait ends.
    """

    store: TaskStore
    world: int
    lost: bool
    ahead: int
    random: Random
    group: str = field(default_factory=lambda: f"group{next(NAMES)}")
    read: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    arrived: set[tuple[str, int]] = field(default_factory=set)
    acked: int = 0
    skipped: int = 0
    keeps: bool = True
    looks: int = 0

    def __post_init__(self) -> None:
        self.ranks = [Process(self, rank) for rank in range(self.world)]

    def run(self, acked: int) -> None:
        """Go on until rank 0 has acknowledged so many decisions more."""
        acked += self.acked
        while self.acked < acked:
            self.turn()

    def turn(self) -> None:
        """Let one process go on that does not wait, or is woken."""
        order = self.random.sample(self.ranks, self.world)
        chosen = next((each for each in order if not each.waiter or self.woken(each)), None)
        if chosen is None:
            assert self.looks, f"all wait: {[each.waiter for each in order]}"
            self.looks -= 1
            for each in order:
                each.waiter = ""
            return
        chosen.requests += 1
        assert chosen.requests < 300, "they ask again and again"
        chosen.waiter = next(chosen.asking)

    def woken(self, process: Process) -> bool:
        return bool(self.store.client.execute("LPOP", self.store.keys.wake(process.waiter)))


class Process:
    """A process that is one rank, and asks as `Ranks` does."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.rank, self.name = job, rank, f"process{next(NAMES)}"
        self.number, self.requests, self.waiter = -1, 0, ""
        self.asking = self.follow() if rank else self.lead()

    def ask(self, number: int, decision: str | None = None) -> StepReply:
        asked = (self.job.group, self.name, self.rank, self.job.world, number, None, decision)
        return self.job.store.call(AskStep(*asked))

    def send(self, number: int, decision: str | None = None) -> Iterator[Waiter]:
        """Ask, others before and after; returns the reply, None if it is lost for good."""
        yield ""
        reply = self.ask(number, decision)
        assert not reply.replaced
        yield ""
        fate = self.job.random.randrange(3) if self.job.lost else 0
        if fate == 1:
            return None
        if fate == 2:
            reply = self.ask(number, decision)
            yield ""
        self.number = reply.number
        return reply

    def follow(self) -> Asking:
        job = self.job
        while True:
            reply = yield from self.send(self.number)
            if reply and reply.decision is None:
                yield f"{self.name}.rank"
            elif reply:
                decision = reply.decision
                job.read[decision].discard(self.rank)  # it may ask again
                yield from self.payload(decision)

    def payload(self, decision: str) -> Asking:
        job, after = self.job, self.number + 1
        sending = self.send(after)
        yield next(sending)
        waiter = next(sending)  # Redis has done it now
        job.read[decision].add(self.rank)
        yield waiter
        if (yield from sending):
            assert not job.keeps or (decision, self.rank) not in job.arrived, "it was read twice"
            job.arrived.add((decision, self.rank))

    def lead(self) -> Asking:
        job, proposal, ready, held = self.job, None, False, []
        while True:
            reply = yield from self.send(self.number, proposal if ready else None)
            if reply is None:
                ready = proposal is not None
            elif reply.decision:
                assert reply.decision == proposal
                held.append((self.number, proposal))
                proposal, ready, self.number = None, False, self.number + 1
                job.read[reply.decision].add(0)
                if len(held) > job.ahead:
                    yield from self.acknowledge(*held.pop(0))
            else:
                ready = not reply.missing
                if ready:
                    proposal = proposal or f"decision{next(NAMES)}"
                else:
                    yield f"{self.name}.rank"

    def acknowledge(self, number: int, decision: str) -> Asking:
        job = self.job
        unread = Unread((-1,))
        while unread.missing and not unread.skipped:
            yield ""
            unread = job.store.call(AskRead(job.group, job.world, number))
            if unread.missing and not unread.skipped:
                yield f"{self.name}.read"
        if unread.skipped:
            job.skipped += 1
        else:
            all_have_read = job.read[decision] == set(range(job.world))
            assert all_have_read or not job.keeps, "one has not read its part"
            job.acked += 1


@pytest.mark.parametrize("world", [1, 2, 3, 9])
@pytest.mark.parametrize("lost", [False, True])
def test_ranks_go_on_whichever_replies_are_lost(open_stream, world, lost):
    for ahead in (0, 2):
        job = Job(open_stream()._task.store, world, lost, ahead, Random(ahead))
        job.run(3)
        assert job.skipped == 0


@pytest.mark.parametrize("world", [1, 2, 3, 9])
@pytest.mark.parametrize("lost", [False, True])
def test_ranks_go_on_when_some_start_again_at_any_request(open_stream, world, lost):
    store = open_stream()._task.store
    for rank in {0, 1, world - 1} & set(range(world)):
        for point in range(12 if world < 4 else 4):
            job = Job(store, world, lost, point % 3, Random(point))
            while job.ranks[rank].requests < point:
                job.turn()
            for each in (rank, world // 2)[: 1 + point % 2]:
                job.ranks[each] = Process(job, each)
            job.run(1)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("kinds", [["ranks"], ["rank_steps"], ["ranks", "rank_steps"]])
def test_ranks_go_on_whenever_their_keys_are_lost(open_stream, world, kinds):
    store = open_stream()._task.store
    for point in range(8):
        job = Job(store, world, True, 0, Random(point))
        while job.ranks[point % world].requests < point:
            job.turn()
        keys = [f"{store.keys.prefix}{kind}:{job.group}" for kind in kinds]
        store.client.execute("DEL", *keys)
        job.keeps, job.looks = False, 2
        job.run(3)
