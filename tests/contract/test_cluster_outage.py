"""A sharded stream on a cluster of which nodes are away: the others go on."""

from __future__ import annotations

import threading
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress
from queue import SimpleQueue

import pytest

import redrb
from redrb import BatchTimeout, ExperienceStream, ShardedStream, StoreFull, StoreUnavailable
from redrb.keys import TaskKeys, registry_key
from redrb.stream import heartbeat
from redrb.stream.take.consumer import Consumer
from tests.audit import audit
from tests.clusters import Primary, RedisCluster
from tests.conftest import REAL
from tests.samples import numbered, numbers
from tests.scenes import until

SHARDS = 6
RETRY_S = 3.0


@pytest.fixture(scope="module", params=list(REAL))
def cluster(request):
    cluster = RedisCluster(REAL[request.param], "--cluster-require-full-coverage", "no")
    yield cluster
    cluster.close()


@pytest.fixture
def client(cluster):
    with redrb.connect(cluster.url, retry_s=RETRY_S) as client:
        yield client


@pytest.fixture(params=["turn", "another"])
def victim(request, cluster, namespace):
    """The node that has the turns of takes, or another one."""
    home = cluster.serving(TaskKeys.of(namespace, "math@turn").stream)
    others = (each for each in cluster.primaries if each is not home)
    yield home if request.param == "turn" else next(others)
    cluster.wait_until_whole()


@pytest.fixture
def stream(client, namespace):
    with ShardedStream(client, "math", shards=SHARDS, namespace=namespace) as stream:
        yield stream
        for shard in stream.shards.values():
            audit(shard)


def on(cluster: RedisCluster, victim: Primary, namespace: str) -> list[str]:
    """Return the shards on a node."""
    names = [f"math@{number}" for number in range(SHARDS)]
    keys = {name: TaskKeys.of(namespace, name).stream for name in names}
    return [name for name, key in keys.items() if cluster.serving(key) is victim]


def fill(stream: ShardedStream) -> None:
    for number in range(24):
        stream.put(numbered(number))


def test_shards_are_spread_over_the_nodes(cluster, stream, namespace):
    assert [len(on(cluster, each, namespace)) for each in cluster.primaries] == [2, 2, 2]
    fill(stream)
    assert [shard.count() for shard in stream.shards.values()] == [4] * SHARDS


@pytest.mark.parametrize("victim", ["another"], indirect=True)
def test_groups_on_other_nodes_are_acknowledged_while_one_is_away(
    cluster, victim, stream, namespace
):
    fill(stream)
    lease = stream.take(24, timeout=5)
    away = on(cluster, victim, namespace)
    victim.kill()
    try:
        began = time.monotonic()
        with pytest.raises(StoreUnavailable) as caught:
            lease.ack()
        assert time.monotonic() - began < RETRY_S + 5, "one time for all parts"
        assert all(f"task '{name}'" in str(caught.value) for name in away)
        assert set(lease.ids) == set(away)
        stats = stream.stats()
        assert stats.ledger.acked == 24 - len(lease) == 24 - 4 * len(away)
        assert stream.away == away
    finally:
        victim.start()
    lease.ack()
    cluster.wait_until_whole()
    deadline = time.monotonic() + 20
    while stream.away and time.monotonic() < deadline:
        time.sleep(0.1)
    assert stream.stats().ledger == redrb.Ledger(put=24, acked=24)


def test_takes_puts_and_new_clients_go_on_with_the_nodes_that_answer(
    cluster, victim, stream, namespace
):
    fill(stream)
    away = on(cluster, victim, namespace)
    there = 24 - 4 * len(away)
    victim.kill()
    try:
        with redrb.connect(cluster.url, retry_s=20) as client:
            began = time.monotonic()
            other = ShardedStream(client, "math", shards=SHARDS, namespace=namespace)
            assert set(other.shards) == {f"math@{n}" for n in range(SHARDS)} - set(away)
            assert other.stats().ledger.waiting == len(other) == there
            exact = other.take(there - 2, timeout=10)
            assert time.monotonic() - began < 10, "nothing waited for the node"
            some = stream.take(20, at_least=1, timeout=0.2)
            assert len(some) == 2
            with pytest.raises((BatchTimeout, StoreUnavailable)) as caught:
                stream.take(1, timeout=0.2)
            if isinstance(caught.value, BatchTimeout):
                assert ", ".join(away) in str(caught.value.__notes__)
            for number in range(24, 36):
                other.put(numbered(number), timeout=5)
            stream.take(12, timeout=5).ack()
            assert time.monotonic() - began < 18
            victim.start()
            cluster.wait_until_whole()
            rest = other.take(4 * len(away), timeout=20)
            assert set(rest.ids) == set(away)
            for lease in (exact, some, rest):
                lease.ack()
            assert set(other.shards) == set(stream.shards)
            assert len(other) == 0
            other.close()
    finally:
        if victim.process is not None and victim.process.poll() is not None:
            victim.start()


def test_reachable_groups_end_before_others_are_waited_for(cluster, namespace, pages):
    """Each part of the lease ends in two pages."""
    pages(ended=2)
    with (
        redrb.connect(cluster.url, retry_s=60) as client,
        ShardedStream(client, "math", shards=SHARDS, namespace=namespace) as stream,
        ThreadPoolExecutor(1) as pool,
    ):
        fill(stream)
        lease = stream.take(24, timeout=5)
        victim = cluster.primaries[0]
        reachable = 24 - 4 * len(on(cluster, victim, namespace))
        victim.kill()
        try:
            ended = pool.submit(lease.ack)
            while stream.stats().ledger.acked < reachable:
                assert not ended.done()
            assert not ended.done()
        finally:
            victim.start()
        ended.result(60)
        assert not lease.ids
    cluster.wait_until_whole()


@pytest.mark.parametrize("victim", ["another"], indirect=True)
def test_a_close_returns_the_leases_of_shards_that_answer_and_names_the_others(
    cluster, victim, namespace
):
    with redrb.connect(cluster.url, retry_s=RETRY_S) as client:

        def opened():
            return ShardedStream(
                client, "math", shards=SHARDS, namespace=namespace, lease_ms=600_000
            )

        closing, other = opened(), opened()
        fill(closing)
        lease = closing.take(24, timeout=5)
        away = on(cluster, victim, namespace)
        there = 24 - 4 * len(away)
        victim.kill()
        try:
            for _ in range(2):
                began = time.monotonic()
                with pytest.raises(StoreUnavailable, match="Close again") as caught:
                    closing.close()
                assert time.monotonic() - began < RETRY_S + 5, "one time for all shards"
                assert f"not closed: tasks {', '.join(map(repr, away))}." in str(caught.value)
                assert other.stats().ledger == redrb.Ledger(put=there, waiting=there)
        finally:
            victim.start()
        cluster.wait_until_whole()
        closing.close()
        assert not lease.ids or len(lease.ids) <= SHARDS
        assert len(other.take(24, timeout=20)) == 24
        other.close()


def test_heartbeats_of_a_stopped_cluster_are_logged_once_and_then_that_it_is_over(
    cluster, namespace, monkeypatch, caplog
):
    beats: SimpleQueue[bool] = SimpleQueue()
    beat = Consumer.beat

    def counted(consumer):
        try:
            beat(consumer)
        except StoreUnavailable:
            beats.put(False)
            raise
        beats.put(True)

    def until_beats(count, *, good):
        """Wait until heartbeats have failed or succeeded so often."""
        while count:
            count -= beats.get(timeout=30) is good

    monkeypatch.setattr(Consumer, "beat", counted)
    monkeypatch.setattr(heartbeat, "LONGEST_PERIOD_S", 0.2)
    with (
        redrb.connect(cluster.url, retry_s=1.0) as client,
        ShardedStream(client, "math", shards=SHARDS, namespace=namespace) as stream,
    ):
        fill(stream)
        lease = stream.take(24, timeout=5)
        caplog.clear()
        for primary in cluster.primaries:
            primary.kill()
        try:
            until_beats(4 * SHARDS, good=False)
            lines = [record.getMessage() for record in caplog.records]
        finally:
            for primary in cluster.primaries:
                primary.start()
            cluster.wait_until_whole()
        until_beats(6 * SHARDS, good=True)
        assert sum("heartbeat failed" in line for line in lines) == 1, lines
        assert sum("is away" in line for line in lines) <= 1, lines
        ends = [record.getMessage() for record in caplog.records][len(lines) :]
        assert sum(line.startswith("recovered") and "heartbeat" in line for line in ends) >= 1, ends
        lease.abandon()


def test_a_take_waits_for_the_node_of_turns_and_takes_what_comes_meanwhile(cluster, namespace):
    with (
        redrb.connect(cluster.url, retry_s=60) as client,
        ShardedStream(client, "math", shards=SHARDS, namespace=namespace) as stream,
        ThreadPoolExecutor(1) as pool,
    ):
        home = cluster.serving(TaskKeys.of(namespace, "math@turn").stream)
        near = [each for each in stream.shards if each not in on(cluster, home, namespace)]
        with pytest.raises(BatchTimeout):
            stream.take(8, timeout=0.2)
        home.kill()
        try:
            taken = pool.submit(stream.take, 8, timeout=30)
            time.sleep(4)  # longer than the outage that each request survives
            assert not taken.done()
            for number in range(8):
                stream.shards[near[number % 4]].put(numbered(number))
            lease = taken.result(10)
            assert sorted(numbers(lease)) == list(range(8))
            lease.ack()
            taken = pool.submit(stream.take, 8, timeout=30)
            time.sleep(4)
            assert not taken.done()
        finally:
            home.start()
        cluster.wait_until_whole()
        for number in range(8):
            stream.put(numbered(number))
        taken.result(20).ack()


@pytest.fixture
def all_away(cluster, stream):
    """Kill all nodes after the shards were opened; they are back at the end."""
    for each in cluster.primaries:
        each.kill()
    yield
    for each in cluster.primaries:
        if each.process.poll() is not None:
            each.start()
    cluster.wait_until_whole()


def ended(call, longest_s: float) -> str:
    """Return why a call cannot reach Redis; "" if it may have."""
    began = time.monotonic()
    with pytest.raises(StoreUnavailable) as caught:
        call()
    assert time.monotonic() - began < longest_s
    return str(caught.value) if not caught.value.uncertain else ""


def put_ended(stream: ShardedStream, timeout: float | None) -> str:
    """Return why puts cannot reach Redis, after those that go through broken connections."""
    for _ in range(12):
        if why := ended(lambda: stream.put(numbered(0), timeout=timeout), RETRY_S + 6):
            return why
    raise AssertionError("each put may have reached a shard")


@pytest.mark.usefixtures("all_away")
def test_while_all_shards_are_away_calls_end_in_time_and_name_all(stream):
    names = "none of the tasks 'math@0' to 'math@5'"
    for call in (stream.stats, lambda: stream.take(1, timeout=0.2), lambda: stream.take(1)):
        assert names in ended(call, RETRY_S + 6)
    for timeout in (0.2, None):
        assert names in put_ended(stream, timeout)


def test_puts_and_takes_go_on_with_the_first_nodes_that_are_back(cluster, namespace, request):
    with (
        redrb.connect(cluster.url, retry_s=90) as client,
        ShardedStream(client, "math", shards=SHARDS, namespace=namespace) as stream,
        ThreadPoolExecutor(6) as pool,
    ):
        last, *back = cluster.primaries
        away = on(cluster, last, namespace)
        request.getfixturevalue("all_away")
        put_ended(stream, 0.2)
        puts = [pool.submit(stream.put, numbered(number)) for number in range(3)]
        takes = [pool.submit(stream.take, 1, timeout=80) for _ in range(3)]
        time.sleep(4)  # longer than the outage that each request survives
        for each in back:
            each.start()
        # a put whose connection broke may have arrived at the node that is away, and stays with it
        stored = wait(puts, timeout=20, return_when=FIRST_COMPLETED).done
        assert stored
        assert {put.result()[0][0] for put in stored}.isdisjoint(away)
        until(lambda: sum(take.done() for take in takes) >= len(stored), 20)
        last.start()
        cluster.wait_until_whole()
        for each in (*puts, *takes):
            each.result(80)
        for take in takes:
            take.result().ack()


def test_opening_many_shards_waits_once_for_the_node_of_the_registry(cluster, namespace):
    victim = cluster.serving(registry_key(namespace))
    names = ((TaskKeys.of(namespace, f"alone{n}").stream, f"alone{n}") for n in range(100))
    alone = next(name for key, name in names if cluster.serving(key) is not victim)
    victim.kill()
    try:
        with redrb.connect(cluster.url, retry_s=60) as client:
            began = time.monotonic()
            ExperienceStream(client, alone, namespace=namespace).close()
            assert time.monotonic() - began < 5
            began = time.monotonic()
            with ShardedStream(client, "math", shards=24, namespace=namespace) as stream:
                assert len(stream.shards) == 16
                assert time.monotonic() - began < 5
                assert len(stream.away) == 8
    finally:
        victim.start()
        cluster.wait_until_whole()


def test_waits_with_a_node_away_do_not_ask_the_others_again_and_again(
    cluster, stream, namespace, monkeypatch
):
    home = cluster.serving(TaskKeys.of(namespace, "math@turn").stream)
    victim = next(each for each in cluster.primaries if each is not home)
    away = on(cluster, victim, namespace)
    for shard in stream.shards.values():
        shard.configure(limit=1)
    calls = []
    for name in ("_sweep", "_granted"):
        method = getattr(ShardedStream, name)

        def counted(*arguments, method=method):
            calls.append(method)
            return method(*arguments)

        monkeypatch.setattr(ShardedStream, name, counted)
    victim.kill()
    try:
        with pytest.raises(BatchTimeout):
            stream.take(1, timeout=5)
        assert len(calls) < 12
        for number in range(SHARDS - len(away)):
            stream.put(numbered(number), timeout=5)
        calls.clear()
        with pytest.raises(StoreFull):
            stream.put(numbered(SHARDS), timeout=5)
        assert len(calls) < 10 * SHARDS
    finally:
        victim.start()
        cluster.wait_until_whole()


@pytest.mark.parametrize("program", list(REAL.values()), ids=list(REAL))
def test_four_of_six_masters_are_killed_and_nothing_is_lost(program, namespace):
    """Makers and trainers go on when they are back; every group is acknowledged once or twice."""
    cluster = RedisCluster(
        program, "--cluster-require-full-coverage", "no", "--appendfsync", "always", size=6
    )
    ended = threading.Event()
    stored: set[int] = set()
    acked: list[int] = []

    def opened(client):
        return ShardedStream(client, "math", shards=SHARDS, namespace=namespace, limit=32)

    def make(first: int) -> None:
        with redrb.connect(cluster.url, retry_s=60) as client, opened(client) as stream:
            for number in range(first, first + 100_000):
                if all(each.done() for each in trainers):
                    return
                stream.put(numbered(number))
                stored.add(number)

    def step(stream: ShardedStream, timeout: float, at_least: int) -> None:
        lease = stream.take(16, at_least=at_least, timeout=timeout)
        own = numbers(lease)
        lease.ack()
        acked.extend(own)

    def train() -> None:
        with redrb.connect(cluster.url, retry_s=60) as client, opened(client) as stream:
            while not ended.is_set():
                step(stream, 60, 16)

    def until_trained(more: int) -> None:
        wanted, deadline = len(acked) + more, time.monotonic() + 60
        while len(acked) < wanted:
            assert time.monotonic() < deadline
            for worker in workers:
                assert not worker.done(), worker.result()
            time.sleep(0.05)

    def train_the_rest() -> None:
        """Train until the makers have ended, and no shard has a group that waits or is leased."""
        deadline = time.monotonic() + 120
        with redrb.connect(cluster.url, retry_s=60) as client, opened(client) as stream:
            while True:
                made = all(each.done() for each in workers)
                ledger = stream.stats().ledger
                if made and not stream.away and not ledger.waiting + ledger.leased:
                    return
                assert time.monotonic() < deadline, ledger
                with suppress(BatchTimeout):
                    step(stream, 0.5, 1)

    threads = ThreadPoolExecutor(4)
    trainers = [threads.submit(train) for _ in range(2)]
    workers = [*trainers, *(threads.submit(make, first) for first in (0, 10**6))]
    try:
        until_trained(200)
        for primary in cluster.primaries[1:5]:
            primary.kill()
        time.sleep(3)
        for primary in cluster.primaries[1:5]:
            primary.start()
        cluster.wait_until_whole()
        until_trained(200)
        ended.set()
        train_the_rest()
        for worker in workers:
            worker.result(120)
        assert stored <= set(acked), "groups that were put were never trained"
        with redrb.connect(cluster.url) as client, opened(client) as stream:
            assert stream.stats().ledger.balanced
            assert stream.stats().ledger.waiting == 0
            for shard in stream.shards.values():
                audit(shard)
    finally:
        ended.set()
        threads.shutdown()
        cluster.close()
