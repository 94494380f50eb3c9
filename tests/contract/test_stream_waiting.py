"""Waiting without polling: who is woken, by what, and in which order."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

import redrb
from redrb import ExperienceStream
from redrb.stream.take.calls import Take, TakeRequest
from tests.audit import audit
from tests.samples import numbered, numbers
from tests.scenes import commands_run, until

WOKEN_S = 10.0
"""Time for a waiter that is woken: less than LOOK_AGAIN_S of `only_wakes`."""


pytestmark = pytest.mark.usefixtures("only_wakes")


@pytest.fixture
def pool():
    with ThreadPoolExecutor(16) as pool:
        yield pool


@pytest.fixture
def stream(client, namespace):
    with ExperienceStream(client, "math", namespace=namespace, limit=12) as stream:
        yield stream
        audit(stream)


def start_take(
    pool: ThreadPoolExecutor, stream: ExperienceStream, count: int, **options: Any
) -> Future[list[int]]:
    """Start a take and return when it is in the queue."""
    before = stream.stats().consumers_waiting
    future = pool.submit(lambda: numbers(stream.take(count, timeout=30, **options)))
    until(lambda: stream.stats().consumers_waiting == before + 1)
    return future


def start_put(
    pool: ThreadPoolExecutor, stream: ExperienceStream, *items: int, **options: Any
) -> Future[tuple[int, ...]]:
    """Start a put and return when it is in the queue."""
    before = stream.stats().producers_waiting
    future = pool.submit(stream.put_many, [[numbered(n)] for n in items], timeout=30, **options)
    until(lambda: stream.stats().producers_waiting == before + 1)
    return future


@pytest.mark.every_server
def test_a_waiting_take_is_woken_by_the_group_that_completes_its_batch(stream, pool):
    took = start_take(pool, stream, 3)
    stream.put(numbered(1))
    stream.put(numbered(2))
    assert not took.done()
    stream.put(numbered(3))
    assert took.result(timeout=WOKEN_S) == [1, 2, 3]


def test_a_put_that_completes_no_batch_costs_little_more_while_a_take_waits(
    real_url, namespace, pool
):
    with redrb.connect(real_url) as client, ExperienceStream(client, "t", namespace=namespace) as t:

        def commands():
            """Return how many commands the cheapest of some puts runs: heartbeats run others."""
            costs = []
            for number in range(4):
                before = commands_run(client)
                t.put(numbered(number))
                costs.append(commands_run(client) - before)
            return min(costs)

        t.join_group()
        unawaited = commands()
        took = start_take(pool, t, 9)
        assert commands() <= unawaited + 8  # 12 more if it looks whom it can wake
        t.put(numbered(8))
        assert len(took.result(timeout=WOKEN_S)) == 9


def test_waiting_takes_are_woken_once_and_in_their_order(stream, pool, monkeypatch):
    looks: Counter[str] = Counter()
    send = Take.with_payload

    def counting(take, *args):
        looks[take.waiter] += 1
        return send(take, *args)

    monkeypatch.setattr(Take, "with_payload", counting)
    took = [start_take(pool, stream, 2) for _ in range(5)]
    for n, future in enumerate(took):
        stream.put(numbered(2 * n))
        stream.put(numbered(2 * n + 1))
        assert future.result(timeout=WOKEN_S) == [2 * n, 2 * n + 1]
        assert not any(later.done() for later in took[n + 1 :])
    assert set(looks.values()) == {2}
    assert len(looks) == 5


def test_one_put_wakes_as_many_takes_as_it_satisfies(stream, pool):
    took = [start_take(pool, stream, 2) for _ in range(4)]
    stream.put_many([[numbered(n)] for n in range(7)])
    assert sorted(future.result(timeout=WOKEN_S) for future in took[:3]) == [[0, 1], [2, 3], [4, 5]]
    assert not took[3].done()
    stream.put(numbered(7))
    assert took[3].result(timeout=WOKEN_S) == [6, 7]


def test_a_large_take_is_not_starved_by_small_ones(stream, pool):
    large = start_take(pool, stream, 8)
    small = [start_take(pool, stream, 1) for _ in range(3)]
    for n in range(8):
        assert not any(future.done() for future in (large, *small))
        stream.put(numbered(n))
    assert large.result(timeout=WOKEN_S) == list(range(8))
    assert not any(future.done() for future in small)
    stream.put_many([[numbered(n)] for n in range(8, 11)])
    assert sorted(future.result(timeout=WOKEN_S) for future in small) == [[8], [9], [10]]


def test_a_take_that_only_looks_does_not_overtake_those_that_wait(stream, pool):
    took = start_take(pool, stream, 2)
    stream.put(numbered(1))
    with pytest.raises(TimeoutError):
        stream.take(1, timeout=0)
    stream.put(numbered(2))
    assert took.result(timeout=WOKEN_S) == [1, 2]


@pytest.mark.every_server
def test_a_take_that_gives_up_lets_the_next_one_have_its_groups(stream, pool):
    stream.put(numbered(1))
    impatient = pool.submit(stream.take, 5, timeout=4)  # longer than the next take needs to queue
    until(lambda: stream.stats().consumers_waiting == 1)
    patient = start_take(pool, stream, 1)
    with pytest.raises(TimeoutError):
        impatient.result(timeout=WOKEN_S)
    assert patient.result(timeout=WOKEN_S) == [1]


@pytest.mark.long
def test_a_take_whose_place_has_lapsed_holds_nobody_up(stream, pool):
    """Its process was killed while it waited."""
    stream.join_group()
    asked, revision = TakeRequest(8, 8), stream._task.description.revision
    dead = Take("default", "dead", "dead/0", "1", asked, "dead.w", 3000, 60_000, revision)
    assert stream._task.store.call(dead).outcome == "short"
    took = start_take(pool, stream, 2)
    time.sleep(3.1)
    stream.put_many([[numbered(1)], [numbered(2)]])
    assert took.result(timeout=WOKEN_S) == [1, 2]


def test_released_groups_wake_a_waiting_take(stream, pool):
    stream.put_many([[numbered(1)], [numbered(2)]])
    lease = stream.take(2, timeout=0)
    took = start_take(pool, stream, 2)
    lease.release()
    assert took.result(timeout=WOKEN_S) == [1, 2]


def test_closing_a_stream_wakes_takes_that_wait_for_its_groups(client, namespace, stream, pool):
    with ExperienceStream(client, "math", namespace=namespace) as other:
        other.put(numbered(1))
        other.take(1, timeout=0)
        took = start_take(pool, stream, 1)
    assert took.result(timeout=WOKEN_S) == [1]


@pytest.mark.every_server
def test_a_blocked_put_is_woken_by_ack(stream, pool):
    stream.put_many([[numbered(n)] for n in range(12)])
    lease = stream.take(4, timeout=0)
    put = start_put(pool, stream, 12)
    assert not put.done()
    lease.ack()
    assert put.result(timeout=WOKEN_S)
    assert stream.stats().stored == 9


@pytest.mark.parametrize("how", ["reject", "clear", "drop_group"])
def test_a_blocked_put_is_woken_by_whatever_makes_room(client, namespace, stream, pool, how):
    with ExperienceStream(client, "math", namespace=namespace, group="second") as second:
        second.join_group()
        stream.put_many([[numbered(n)] for n in range(12)])
        lease = stream.take(12, timeout=0)
        if how == "drop_group":
            lease.ack()
        put = start_put(pool, stream, 12)
        if how == "reject":
            second.take(12, timeout=0).ack()
            lease.reject("bad")
        elif how == "clear":
            stream.clear()
        else:
            second.drop_group()
        assert put.result(timeout=WOKEN_S)


@pytest.mark.parametrize(
    "how", ["take", "where", "expire", "stale", "settle", "clear", "drop_group"]
)
def test_a_put_that_max_waiting_blocks_is_woken_by_whatever_takes_groups(
    client, namespace, pool, how
):
    options = {"max_waiting": 3, "max_staleness": 1, "tags": ["n"]}
    with ExperienceStream(client, "math", namespace=namespace, **options) as stream:
        stream.join_group()
        ids = [stream.put(numbered(n), policy_version=1, tags={"n": n})[0] for n in range(3)]
        slow = ExperienceStream(client, "math", namespace=namespace, group="slow")
        if how == "drop_group":
            slow.join_group()
            stream.take(1, timeout=0)
        put = start_put(pool, stream, 3, policy_version=9)
        if how == "stale":
            stream.advance(9)
        ways = {
            "take": lambda: stream.take(1, timeout=0),
            "where": lambda: stream.take(1, timeout=0, where={"n": 2}),
            "expire": lambda: stream.expire(9),
            "stale": stream.expire,
            "settle": lambda: stream.settle({ids[0]: 1}, incarnation=stream.incarnation),
            "clear": stream.clear,
            "drop_group": slow.drop_group,
        }
        ways[how]()
        assert put.result(timeout=WOKEN_S)


def test_blocked_puts_go_in_in_their_order(stream, pool):
    stream.put_many([[numbered(n)] for n in range(12)])
    puts = [start_put(pool, stream, 100 + n) for n in range(4)]
    for n in range(4):
        stream.take(1, timeout=0).ack()
        puts[n].result(timeout=WOKEN_S)
        assert not any(put.done() for put in puts[n + 1 :])
    assert numbers(stream.take(12, timeout=0))[8:] == [100, 101, 102, 103]


@pytest.mark.long
def test_sixty_four_takes_that_wait_are_all_served(client, namespace, stream):
    with ThreadPoolExecutor(64) as many:
        took = [many.submit(lambda: stream.take(2, timeout=30).ack()) for _ in range(64)]
        for n in range(128):
            stream.put(numbered(n), timeout=30)
        for future in took:
            future.result(timeout=10)
    assert stream.stats().ledger.acked == 128


@pytest.mark.every_server
@pytest.mark.parametrize("seconds", [0.0, 0.0004, 0.001, 0.0011, 0.0015, 0.002, 0.0029])
def test_the_shortest_wait_ends(client, namespace, seconds):
    """A timeout that is rounded to 0 would block for ever."""
    with ExperienceStream(client, "math", namespace=namespace) as stream:
        began = time.monotonic()
        stream._task.store.wait_for_wake("somebody", "another", longest_s=seconds)
        assert time.monotonic() - began < 30
