"""A sharded stream: puts and takes use all shards, whichever is empty, full or away."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import torch

import redrb
from redrb import BatchTimeout, ConfigError, ExperienceStream, ShardedStream, Status, StoreFull
from redrb.connection import Client, deadline
from redrb.errors import LeaseLost, StoreUnavailable, TaskMismatch
from redrb.stream.put.pending import PendingPut
from redrb.stream.put.producer import Epoch, Producer
from redrb.stream.sharded.shards import Shards
from tests.audit import audit, kill_consumer
from tests.samples import numbered

Open = Callable[..., ShardedStream]


@pytest.fixture
def open_shards(client: Client, namespace: str) -> Iterator[Open]:
    """Open a sharded stream several times; every shard is audited at the end."""
    opened: list[ShardedStream] = []

    def open_it(shards: int = 4, **settings: Any) -> ShardedStream:
        opened.append(ShardedStream(client, "math", shards=shards, namespace=namespace, **settings))
        return opened[-1]

    yield open_it
    for shard in opened[0].shards.values():
        audit(shard)
    for stream in opened:
        stream.close()


def put(stream: ShardedStream, *group_numbers: int, **options: Any) -> list[tuple[str, int]]:
    return [stream.put(numbered(number), **options)[0] for number in group_numbers]


def numbers(lease: redrb.stream.mixture.MixtureLease) -> list[int]:
    return sorted(int(item.reward) for item in lease.items() if item.reward is not None)


def shard(stream: ShardedStream, number: int) -> ExperienceStream:
    return stream.shards[f"math@{number}"]


def waiting_everywhere(stream: ShardedStream, who: str) -> int:
    """Return how many takes, or puts, wait in each of the shards."""
    return min(getattr(each.stats(), f"{who}_waiting") for each in stream.shards.values())


@pytest.mark.parametrize("groups", [1, 32, 33, 300])
def test_puts_spread_and_a_take_collects_from_all_shards(open_shards: Open, groups: int) -> None:
    stream = open_shards()
    ids = stream.put_many([[numbered(number)] for number in range(groups)])
    assert len(set(ids)) == groups
    assert {name for name, _ in ids} <= set(stream.shards)
    if groups == 300:
        assert sorted(each.count() for each in stream.shards.values()) == [64, 64, 76, 96]
    with stream.take(groups, timeout=0) as lease:
        assert numbers(lease) == list(range(groups))
        assert {(name, seq) for name, seqs in lease.ids.items() for seq in seqs} == set(ids)
    assert stream.stats().ledger == redrb.Ledger(put=groups, acked=groups)
    assert len(stream) == 0


def test_single_puts_go_to_the_shards_in_turn(open_shards: Open) -> None:
    stream = open_shards()
    put(stream, *range(12))
    assert [each.count() for each in stream.shards.values()] == [3, 3, 3, 3]


def test_an_incomplete_batch_is_released(open_shards: Open) -> None:
    stream = open_shards()
    put(stream, *range(6))
    for timeout in (0, 0.05):
        with pytest.raises(BatchTimeout) as caught:
            stream.take(7, timeout=timeout)
        assert (caught.value.available, caught.value.wanted) == (6, 7)
        stats = stream.stats()
        assert (stats.ledger.waiting, stats.ledger.leased, stats.consumers_waiting) == (6, 0, 0)
    assert len(stream.take(7, at_least=5, timeout=0.05)) == 6


@pytest.mark.parametrize("other", [1, 3])
def test_a_take_waits_for_groups_of_any_shard(
    open_shards: Open, monkeypatch: pytest.MonkeyPatch, other: int
) -> None:
    monkeypatch.setattr(deadline, "SLICE_S", 60)  # it does not look again by itself
    stream, maker = open_shards(), open_shards()
    shard(maker, 1).put_many([[numbered(0)], [numbered(1)]])
    with ThreadPoolExecutor(1) as threads:
        taking = threads.submit(stream.take, 5, timeout=20)
        for number in range(2, 5):
            while waiting_everywhere(stream, "consumers") < 1:
                pass
            shard(maker, other).put(numbered(number))
        lease = taking.result()
    assert numbers(lease) == [0, 1, 2, 3, 4]
    assert stream.stats().consumers_waiting == 0
    lease.ack()


def test_takes_that_wait_do_not_hold_groups_that_another_one_needs(open_shards: Open) -> None:
    streams = [open_shards() for _ in range(3)]
    maker = open_shards()
    put(maker, *range(4))
    with ThreadPoolExecutor(3) as threads:
        takes = [threads.submit(stream.take, 6, timeout=20) for stream in streams]
        for first in (4, 6, 12):
            put(maker, *range(first, {4: 6, 6: 12, 12: 18}[first]))
            while sum(take.done() for take in takes) < {4: 1, 6: 2, 12: 3}[first]:
                pass
        leases = [take.result() for take in takes]
    assert sorted(number for lease in leases for number in numbers(lease)) == list(range(18))


def test_a_take_that_dies_with_the_turn_gives_it_to_the_next(open_shards: Open) -> None:
    dead, alive = open_shards(lease_ms=300), open_shards(lease_ms=300)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(dead.take, 2, timeout=5)
        while waiting_everywhere(dead, "consumers") < 1:
            pass
        assert dead._turn is not None
        kill_consumer(dead._turn)
        put(alive, 0)
        taking = threads_take(alive, 2)
        put(alive, 1, 2, 3)
        assert len(taking()) == 2
        assert len(waiting.result()) == 2


def lose_all_keys(turn: ExperienceStream) -> None:
    """Delete the keys of the turn and of all shards, as if Redis had lost its data."""
    client = turn._store.client
    client.execute("DEL", *client.execute("KEYS", f"redrb:{{{turn.namespace}:*"))


def end_group(turn: ExperienceStream) -> None:
    """Let the group of the turn leave the task, as an acknowledgement or a dead letter does."""
    assert turn.settle({1: 1}, incarnation=turn.incarnation) == 1


@pytest.mark.parametrize(
    "lose",
    [ExperienceStream.clear, ExperienceStream.drop_group, lose_all_keys, end_group],
    ids=lambda lose: lose.__name__,
)
def test_takes_that_wait_go_on_when_the_turn_is_lost(
    open_shards: Open, lose: Callable[[ExperienceStream], object]
) -> None:
    streams, maker = [open_shards(2) for _ in range(3)], open_shards(2)
    with ThreadPoolExecutor(3) as threads:
        takes = [threads.submit(stream.take, 2, timeout=60) for stream in streams]
        while waiting_everywhere(maker, "consumers") < 1:
            pass
        turn = ExperienceStream(maker._client, "math@turn", namespace=maker.namespace, create=False)
        while turn.stats().consumers_waiting < 2:
            pass
        lose(turn)
        put(maker, *range(6))
        leases = [take.result(20) for take in takes]
        turn.close()
    assert sorted(number for lease in leases for number in numbers(lease)) == list(range(6))


def test_the_number_of_shards_is_kept_when_shards_are_created_anew(open_shards: Open) -> None:
    stream = open_shards(2)
    for each in stream.shards.values():
        each.clear()
    put(stream, 1, 2)
    with pytest.raises(TaskMismatch, match="shards is 2, not 3"):
        open_shards(3)
    lose_all_keys(shard(stream, 0))
    other = open_shards(3)  # it comes first, and those that have used two of them learn it
    for call in (lambda: put(stream, 3, 4), lambda: stream.take(1, timeout=0)):
        with pytest.raises(TaskMismatch, match="shards is 3, not 2"):
            call()
    put(other, 5)
    assert len(other) == 1


def test_rights_of_one_shard_are_refused_for_all(open_shards: Open) -> None:
    stream = open_shards(2, max_staleness=1, groups_per_version=4)
    with shard(stream, 0).admit(1) as right:
        for call in (stream.put, lambda item, **more: stream.put_many([[item]], **more)):
            with pytest.raises(ConfigError, match="of one shard"):
                call(numbered(1), policy_version=0, admission=right)
        assert len(stream) == 0
        shard(stream, 0).put(numbered(1), policy_version=0, admission=right)


def threads_take(stream: ShardedStream, count: int) -> Callable[[], Any]:
    """Begin to take in a thread; returns a function that waits for the lease."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(stream.take(count, timeout=20)))
    thread.start()

    def result() -> Any:
        thread.join(30)
        return found[0]

    return result


def test_the_ledger_is_exact_with_many_makers_and_takers(open_shards: Open) -> None:
    made, taken, lock = 240, list[int](), threading.Lock()
    streams = [open_shards(3, limit=20) for _ in range(3)]

    def make(stream: ShardedStream, first: int) -> None:
        for number in range(first, first + made // 6, 2):
            stream.put_many([[numbered(number)], [numbered(number + 1)]], timeout=30)

    def train(stream: ShardedStream) -> None:
        before = None
        while True:
            try:
                lease = stream.take(7, timeout=2, at_least=1, ack=before)
            except BatchTimeout:
                return
            with lock:
                taken.extend(numbers(lease))
            before = lease

    with ThreadPoolExecutor(10) as threads:
        firsts = range(0, made, made // 6)
        jobs = [threads.submit(make, streams[each % 3], first) for each, first in enumerate(firsts)]
        jobs += [threads.submit(train, streams[each % 3]) for each in range(4)]
        for job in jobs:
            job.result()
    assert sorted(taken) == list(range(made))
    assert streams[0].stats().ledger == redrb.Ledger(put=made, acked=made)


def test_groups_of_a_dead_trainer_return(open_shards: Open) -> None:
    dead, alive = open_shards(), open_shards(lease_ms=300)
    put(alive, *range(8))
    lease = dead.take(8, timeout=0)
    for each in dead.shards.values():
        kill_consumer(each)
    other = alive.take(8, timeout=20)
    assert numbers(other) == list(range(8))
    with pytest.raises(LeaseLost):
        lease.ack()
    other.ack()


def test_a_put_leaves_out_a_full_shard_and_waits_only_when_all_are_full(open_shards: Open) -> None:
    stream = open_shards(4, limit=2, on_full="error")
    put(stream, *range(8))
    with pytest.raises(StoreFull):
        put(stream, 8)
    shard(stream, 3).take(1, timeout=0).ack()
    assert put(stream, 8)[0][0] == "math@3"
    blocking = open_shards(4)
    began = time.monotonic()
    with pytest.raises(StoreFull, match="is full"):
        blocking.put(numbered(0), timeout=0.05)
    assert time.monotonic() - began < 5
    with pytest.raises(ConfigError, match="at most 2"):
        blocking.take(9, timeout=1)


def test_puts_that_wait_for_room_are_woken_by_any_shard_in_their_order(
    open_shards: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadline, "SLICE_S", 60)  # none of them looks again by itself
    stream = open_shards(4, limit=1)
    put(stream, *range(4))
    with ThreadPoolExecutor(2) as threads:
        putting = []
        for number in range(2):
            putting.append(threads.submit(put, stream, 10 + number, timeout=10))
            while waiting_everywhere(stream, "producers") < number + 1:
                pass
            assert stream.stats().producers_waiting == number + 1
        for number, place in enumerate((2, 0)):
            shard(stream, place).take(1, timeout=0).ack()
            assert putting[number].result()[0][0] == f"math@{place}"
    assert stream.stats().producers_waiting == 0


def test_a_large_put_waits_for_room_for_each_of_its_groups(open_shards: Open) -> None:
    stream = open_shards(4, limit=2)
    taken: list[int] = []
    with ThreadPoolExecutor(1) as threads:
        putting = threads.submit(
            stream.put_many, [[numbered(number)] for number in range(36)], timeout=20
        )
        while len(taken) < 36:
            with suppress(BatchTimeout), stream.take(8, at_least=1, timeout=0.2) as lease:
                taken += numbers(lease)
        assert len(set(putting.result())) == 36
    assert sorted(taken) == list(range(36))
    with pytest.raises(StoreFull) as caught:
        stream.put_many([[numbered(number)] for number in range(12)], timeout=0)
    assert caught.value.stored == len(stream) == 8


def test_a_put_that_may_still_arrive_stays_in_its_shard(
    open_shards: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = open_shards(2)
    finish, tried = Producer.finish, list[str]()

    def lose_the_first_reply(producer: Producer, pending: PendingPut) -> tuple[int, ...]:
        tried.append(producer._task.name)
        ids = finish(producer, pending)
        if len(tried) == 1:  # the groups are stored, and the reply is lost
            pending.ids.clear()
            pending.repeated = True
            raise StoreUnavailable("lost", where="", uncertain=True)
        return ids

    monkeypatch.setattr(Producer, "finish", lose_the_first_reply)
    with pytest.raises(StoreUnavailable):
        stream.put(numbered(1), timeout=0)
    assert len(set(tried)) == 1
    assert len(stream) == 1


@pytest.mark.parametrize("breaks", ["opening", "epoch"])
def test_a_put_of_which_nothing_was_sent_goes_to_another_shard(
    open_shards: Open, monkeypatch: pytest.MonkeyPatch, breaks: str
) -> None:
    """Also where the shard may have done an earlier request, whose reply was lost."""
    check, current, broken = Shards._check_count, Epoch.current, [breaks == "opening"]

    def opens(whole: Shards, number: int) -> None:
        if number == 1 and breaks == "opening":
            raise StoreUnavailable("lost", where="", uncertain=True)
        check(whole, number)

    def epoch(self: Epoch) -> tuple[str, int]:
        if broken[0] and self._task.name == "math@1":
            raise StoreUnavailable("lost", where="", uncertain=True)
        return current(self)

    monkeypatch.setattr(Shards, "_check_count", opens)
    monkeypatch.setattr(Epoch, "current", epoch)
    stream = open_shards(2)
    broken[0] = True
    assert {name for name, _ in put(stream, *range(6))} == {"math@0"}


def test_groups_that_a_shard_drops_are_put_nowhere_else(open_shards: Open) -> None:
    stream = open_shards(2, on_bad_group="drop")
    other = redrb.BufferItem(torch.arange(4), torch.zeros(2))
    shard(open_shards(2), 1).put(other)  # completed groups of this shard have these fields
    ids = [each for number in range(4) for each in stream.put_many([[numbered(number)]] * 2)]
    assert {name for name, _ in ids} == {"math@0"}
    assert len(ids) == len(set(ids)) == 4
    assert len(stream) == 5


def test_every_process_gives_the_same_number_of_shards(open_shards: Open) -> None:
    open_shards(4)
    for other in (3, 5):
        with pytest.raises(TaskMismatch, match=rf"shards is 4, not {other}"):
            open_shards(other)
    for wrong in (0, 1025, "4"):
        with pytest.raises(ConfigError, match="shards"):
            open_shards(wrong)


def test_settings_filters_and_status_are_those_of_streams(open_shards: Open) -> None:
    stream = open_shards(
        2, tags=["kind"], max_staleness=2, filters=[lambda group: group[0].reward != 3]
    )
    for each in stream.shards.values():
        each.join_group()
        each.advance(4)
    stream.put_many([[numbered(n)] for n in range(4)], policy_version=4, tags={"kind": "a"})
    stream.put(numbered(9), policy_version=4, tags={"kind": "b"}, status="aborted")
    assert numbers(stream.take(2, timeout=0, where={"kind": "a"})) == [0, 1]
    assert numbers(stream.take(1, timeout=5, status=Status.ABORTED, where={"kind": "b"})) == [9]
    with pytest.raises(BatchTimeout):
        stream.take(2, timeout=0.1, where={"kind": "a"})
    assert len(stream) == 1
    for each in stream.shards.values():
        each.advance(7)
    with pytest.raises(BatchTimeout):
        stream.take(1, timeout=0.05)
    assert stream.stats().ledger.expired == 1
    assert stream.stats().ledger.filtered == 1


def test_a_second_consumer_group_gets_every_group(open_shards: Open) -> None:
    stream, critic = open_shards(), open_shards(group="critic")
    for each in critic.shards.values():
        each.join_group()
    put(stream, *range(6))
    stream.take(6, timeout=1).ack()
    with ThreadPoolExecutor(1) as threads:
        taking = threads.submit(critic.take, 8, timeout=20)
        put(stream, 6, 7)
        taking.result().ack()
    assert [each.stats().ledger.acked for each in (stream, critic)] == [6, 8]
    stream.take(2, timeout=1).ack()
