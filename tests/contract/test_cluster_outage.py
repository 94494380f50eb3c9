"""A task in partitions on a cluster of which one node is away: the others go on."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import pytest

import redrb
from redrb import BatchTimeout, ExperienceStream, Status, StoreUnavailable
from redrb.keys import TaskKeys
from redrb.stream import heartbeat
from redrb.stream.take.consumer import Consumer
from redrb.stream.task.lookup import task_stats
from tests.audit import audit
from tests.clusters import Primary, RedisCluster
from tests.conftest import REAL
from tests.one_partition import each_partition
from tests.samples import numbered, numbers

PARTITIONS = 6
RETRY_S = 3.0


@pytest.fixture(scope="module", params=list(REAL))
def cluster(request):
    cluster = RedisCluster(REAL[request.param], "--cluster-require-full-coverage", "no")
    yield cluster
    cluster.close()


@pytest.fixture
def client(cluster, request):
    with redrb.connect(cluster.url, retry_s=getattr(request, "param", RETRY_S)) as client:
        yield client


@pytest.fixture(params=["home"])
def victim(request, cluster, namespace):
    """The node that has partition 0 and the turns of takes, or another one."""
    home = cluster.serving(TaskKeys.of(namespace, "math").stream)
    others = (each for each in cluster.primaries if each is not home)
    yield home if request.param == "home" else next(others)
    cluster.wait_until_whole()


@pytest.fixture
def stream(client, namespace):
    with ExperienceStream(client, "math", namespace=namespace, partitions=PARTITIONS) as stream:
        yield stream
        for partition in each_partition(stream):
            audit(partition)


def on(cluster: RedisCluster, victim: Primary, stream: ExperienceStream) -> tuple[int, ...]:
    """Return the partitions on a node."""
    partitions = each_partition(stream)
    keys = [partition._task.store.keys.stream for partition in partitions]
    return tuple(number for number, key in enumerate(keys) if cluster.serving(key) is victim)


def fill(stream: ExperienceStream, groups: int = 24) -> None:
    """Put groups, as many into each partition."""
    for number in range(groups):
        each_partition(stream)[number % PARTITIONS].put([numbered(number)])


def test_groups_on_other_nodes_are_acknowledged_while_one_is_away(cluster, victim, stream):
    fill(stream)
    lease = stream.take(24, timeout=5)
    away = on(cluster, victim, stream)
    victim.kill()
    try:
        began = time.monotonic()
        with pytest.raises(
            StoreUnavailable, match=rf"partition {away[0]} of task 'math'.* not"
        ) as caught:
            lease.ack()
        assert time.monotonic() - began < RETRY_S + 5, "one time for all parts"
        assert all(f"partition {number} of" in str(caught.value) for number in away)
        assert {group % PARTITIONS for group in lease.ids} == set(away)
        stats = stream.stats()
        assert stats.ledger.acked == 24 - len(lease) == 24 - 4 * len(away)
        assert stats.missing_partitions == away
    finally:
        victim.start()
    lease.ack()
    deadline = time.monotonic() + 20
    while stream.stats().missing_partitions and time.monotonic() < deadline:
        time.sleep(0.1)
    assert stream.stats().ledger == redrb.Ledger(put=24, acked=24)


@pytest.mark.parametrize("victim", ["home", "another"], indirect=True)
def test_takes_puts_and_new_clients_go_on_with_the_nodes_that_answer(
    cluster, victim, stream, namespace
):
    fill(stream)
    away = on(cluster, victim, stream)
    there = 24 - 4 * len(away)
    home = 0 in away
    victim.kill()
    try:
        with redrb.connect(cluster.url, retry_s=20) as client:
            began = time.monotonic()
            other = ExperienceStream(client, "math", namespace=namespace, partitions=PARTITIONS)
            assert other.stats().ledger.waiting == other.count() == there
            if not home:
                seen = task_stats(client, "math", namespace=namespace, group="default")
                assert (seen.missing_partitions, seen.ledger.waiting) == (away, there)
            exact = other.take(there - 2, timeout=10)
            assert time.monotonic() - began < 10, "nothing waited for the node"
            some = stream.take(20, at_least=1, timeout=0.2)
            assert len(some) == 2
            with pytest.raises((BatchTimeout, StoreUnavailable)) as caught:
                stream.take(1, timeout=0.2)
            if isinstance(caught.value, BatchTimeout):
                assert caught.value.missing_partitions == away
                assert f"Partitions {', '.join(map(str, away))} could not be" in str(caught.value)
            for number in range(24, 36):
                other.put([numbered(number)], timeout=5)
            stream.take(12, timeout=5).ack()
            assert time.monotonic() - began < 18
            victim.start()
            cluster.wait_until_whole()
            rest = other.take(4 * len(away), timeout=20)
            assert {number % PARTITIONS for number in numbers(rest)} == set(away)
            for lease in (exact, some, rest):
                lease.ack()
            assert other.incarnation == stream.incarnation
            other.close()
    finally:
        if victim.process is not None and victim.process.poll() is not None:
            victim.start()


def test_reachable_groups_end_before_others_are_waited_for(cluster, victim, namespace, pages):
    """Each part of the lease ends in two pages."""
    pages(ended=2)
    with (
        redrb.connect(cluster.url, retry_s=60) as client,
        ThreadPoolExecutor(1) as pool,
        ExperienceStream(client, "math", namespace=namespace, partitions=PARTITIONS) as stream,
    ):
        fill(stream)
        lease = stream.take(24, timeout=5)
        reachable = 24 - 4 * len(on(cluster, victim, stream))
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


def test_a_close_returns_the_leases_of_reachable_partitions_and_goes_on(cluster, victim, namespace):
    with redrb.connect(cluster.url, retry_s=0.5) as client:

        def opened():
            options = {"partitions": PARTITIONS, "lease_ms": 600_000}
            return ExperienceStream(client, "math", namespace=namespace, **options)

        closing, other = opened(), opened()
        fill(closing)
        closing.take(24, timeout=5)
        away = on(cluster, victim, closing)
        there = 24 - 4 * len(away)
        victim.kill()
        try:
            for _ in range(2):
                with pytest.raises(StoreUnavailable) as caught:
                    closing.close()
                assert all(f"partition {number}" in str(caught.value) for number in away)
            assert other.stats().ledger == redrb.Ledger(put=there, waiting=there)
        finally:
            victim.start()
        cluster.wait_until_whole()
        closing.close()
        assert len(other.take(24, timeout=20)) == 24
        other.close()


def test_changes_reach_all_partitions_that_can_be_reached(cluster, victim, namespace):
    settings = {"max_dead": 600, "partitions": PARTITIONS}
    with redrb.connect(cluster.url, retry_s=0.5) as client:
        stream = ExperienceStream(client, "math", namespace=namespace, **settings)
        leaving = ExperienceStream(client, "math", namespace=namespace, **settings)
        fill(stream, 5 * PARTITIONS)
        for number in range(PARTITIONS):
            each_partition(stream)[number].take(1, timeout=0).ack()
            each_partition(stream)[number].take(1, timeout=0).reject("bad")
            each_partition(leaving)[number].take(1, timeout=0)
        letters = [letter.id for letter in stream.dead_letters()]
        away = on(cluster, victim, stream)
        near = [number for number in range(PARTITIONS) if number not in away]
        partitions = [each_partition(stream)[number] for number in near]

        def counted(status=Status.COMPLETED):
            return sum(partition.count(status) for partition in partitions)

        victim.kill()
        try:
            assert len(stream.dead_letters()) == len(near)
            for change in (
                lambda: stream.advance(7),
                lambda: stream.dismiss(leaving.consumer),
                lambda: stream.requeue(letters),
                lambda: stream.configure(max_dead=60),
                lambda: stream.move(range(PARTITIONS, 6 * PARTITIONS), Status.ABORTED),
            ):
                with pytest.raises(StoreUnavailable) as caught:
                    change()
                assert all(f"partition {number}" in str(caught.value) for number in away)
            assert {partition.stats().version for partition in partitions} == {7}
            assert {each.settings().values["max_dead"] for each in partitions} == {"10"}
            assert (counted(), counted(Status.ABORTED)) == (len(near), 3 * len(near))
        finally:
            victim.start()
        cluster.wait_until_whole()
        assert stream.advance(7) == 7
        assert len(stream.requeue(letters)) == len(away)
        stream.configure(max_dead=60)
        leaving.close()
        assert stream.count() == 4 * len(away) + len(near)
        stream.close()


@pytest.mark.parametrize("client", [1.0], indirect=True)
def test_heartbeats_of_a_stopped_cluster_are_logged_once_and_then_that_it_is_over(
    cluster, stream, monkeypatch, caplog
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

    def until(count, *, good):
        """Wait until heartbeats have failed or succeeded so often."""
        while count:
            count -= beats.get(timeout=30) is good

    monkeypatch.setattr(Consumer, "beat", counted)
    monkeypatch.setattr(heartbeat, "LONGEST_PERIOD_S", 0.2)
    fill(stream)
    lease = stream.take(24, timeout=5)
    caplog.clear()
    for primary in cluster.primaries:
        primary.kill()
    try:
        until(4 * PARTITIONS, good=False)
        lines = [record.getMessage() for record in caplog.records]
    finally:
        for primary in cluster.primaries:
            primary.start()
        cluster.wait_until_whole()
    until(6 * PARTITIONS, good=True)
    assert sum("heartbeat failed" in line for line in lines) == 1, lines
    assert sum("is away" in line for line in lines) <= 1, lines
    ends = [record.getMessage() for record in caplog.records][len(lines) :]
    assert sum(line.startswith("recovered") and "heartbeat" in line for line in ends) >= 1, ends
    lease.abandon()
