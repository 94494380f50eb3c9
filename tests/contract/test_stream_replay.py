"""Replay: rates of reads and inserts, filters, and consumer groups that begin late."""

from __future__ import annotations

import math
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from redrb import (
    BatchTimeout,
    ConfigError,
    ExperienceStream,
    RateLimit,
    Status,
    StoreFull,
    make_experience_batch,
    reward_variance,
)
from redrb.connection import Client
from tests.audit import audit
from tests.samples import numbered, numbers
from tests.scenes import until

WOKEN_S = 10.0
"""Time for a waiter that is woken: less than LOOK_AGAIN_S of `only_wakes`."""


def stream_of(client: Client, namespace: str, **options: Any) -> ExperienceStream:
    return ExperienceStream(client, "replay", namespace=namespace, **options)


def put(stream: ExperienceStream, *these: int, **options: Any) -> tuple[int, ...]:
    return stream.put_many([[numbered(n)] for n in these], **options)


@pytest.mark.every_server
@pytest.mark.parametrize("most", [1e19, math.inf])
def test_a_rate_without_an_upper_bound_holds_no_put_back(client, namespace, most):
    stream = stream_of(client, namespace, rate=RateLimit(1.0, 1, 0.0, most))
    assert [stream.put(numbered(number)) for number in range(3)] == [(1,), (2,), (3,)]


def test_nothing_is_taken_before_min_size(client, namespace):
    stream = stream_of(client, namespace, rate=RateLimit.at_least(3), max_reads=0)
    put(stream, 0, 1)
    with pytest.raises(BatchTimeout):
        stream.take(1, timeout=0)
    put(stream, 2)
    for _ in range(5):
        with stream.take(3, timeout=0):
            pass


def test_a_ratio_blocks_whichever_side_is_ahead(client, namespace):
    rate = RateLimit.ratio(2.0, min_size=2, error_buffer=2.0)  # reads stay within 2 of 2 * inserts
    stream = stream_of(client, namespace, rate=rate, max_reads=0, on_full="error")
    put(stream, 0, 1, 2)
    with pytest.raises(StoreFull) as caught:
        put(stream, 3)
    assert caught.value.reason == "rate"
    for _ in range(2):
        with stream.take(2, timeout=0):
            pass
    with pytest.raises(BatchTimeout):
        stream.take(1, timeout=0)
    put(stream, 4)
    lease = stream.take(2, timeout=0)
    lease.release()  # a released group was not read
    with stream.take(2, timeout=0):
        pass
    with pytest.raises(BatchTimeout):
        stream.take(1, timeout=0)
    audit(stream)


def test_a_blocked_put_goes_on_when_something_is_read(client, namespace, only_wakes):
    stream = stream_of(client, namespace, rate=RateLimit.queue(2))
    stream.join_group()
    put(stream, 0, 1)
    with ThreadPoolExecutor(1) as pool:
        blocked = pool.submit(put, stream, 2, timeout=30)
        until(lambda: stream.stats().producers_waiting == 1)
        with stream.take(1, timeout=0) as lease:
            assert numbers(lease) == [0]
            blocked.result(timeout=WOKEN_S)
    assert numbers(stream.take(2, timeout=0)) == [1, 2]


def test_a_blocked_take_goes_on_when_something_is_put(client, namespace, only_wakes):
    stream = stream_of(client, namespace, rate=RateLimit.at_least(2), max_reads=0)
    put(stream, 0)
    with ThreadPoolExecutor(1) as pool:
        blocked = pool.submit(stream.take, 1, timeout=30)
        until(lambda: stream.stats().consumers_waiting == 1)
        put(stream, 1)
        assert numbers(blocked.result(timeout=WOKEN_S)) == [0]


def test_a_rate_does_not_wait_for_reads_that_no_consumer_can_make(client, namespace):
    stream = stream_of(
        client,
        namespace,
        rate=RateLimit.queue(2),
        max_staleness=1,
        max_deliveries=1,
        on_full="error",
    )
    stream.join_group()
    for version in range(1, 4):
        put(stream, 0, 1, policy_version=version)
        assert stream.expire(version + 2) == 2
    put(stream, 0, 1, policy_version=9)
    with pytest.raises(ZeroDivisionError), stream.take(2, timeout=0):
        raise ZeroDivisionError
    assert stream.stats().ledger.dead == 2
    stream.advance(20)
    put(stream, 2, 3, policy_version=9)  # too stale on arrival
    put(stream, 4, 5, policy_version=20)
    assert numbers(stream.take(2, timeout=0)) == [4, 5]
    audit(stream)


@pytest.mark.parametrize("how", ["expire", "evict", "reject", "discard"])
def test_a_rate_waits_only_for_the_reads_that_are_left(client, namespace, how):
    rate = RateLimit.ratio(
        3.0, min_size=1, error_buffer=9.0
    )  # reads stay within 9 of 3 * inserts - 3
    stream = stream_of(
        client,
        namespace,
        rate=rate,
        max_reads=3,
        max_staleness=1,
        on_full="error",
        **({"capacity": 4} if how == "evict" else {}),
    )
    stream.join_group()
    ids = put(stream, 0, 1, 2, 3, policy_version=1)
    stream.take(2, timeout=0).ack()  # two have two reads left, two have three
    with pytest.raises(StoreFull):
        put(stream, 9, 9, policy_version=9)
    if how == "expire":
        assert stream.expire(9) == 4
    elif how == "evict":
        stream.take(1, timeout=0).ack()
        put(stream, 4, policy_version=9)  # evicts one with one read left
    elif how == "reject":
        stream.take(4, timeout=0).reject("no more")
    else:
        stream.advance(9)
        with pytest.raises(BatchTimeout):
            stream.take(1, timeout=0)
    audit(stream)
    counters = client.execute(
        "HMGET", f"{stream._task.store.keys.prefix}group:default", "taken", "unread"
    )
    expected = {"evict": (3, 1), "reject": (6, 6)}.get(how, (2, 10))
    assert tuple(map(int, counters)) == expected
    if how != "evict":  # no consumer can read them: for the rate they were not put
        put(stream, *range(4), policy_version=9)
        with pytest.raises(StoreFull):
            put(stream, 9, policy_version=9)
    assert ids


def test_groups_that_leave_unread_do_not_use_up_the_reads_of_others(client, namespace):
    rate = RateLimit.ratio(0.5, min_size=1, error_buffer=20.0)
    stream = stream_of(client, namespace, rate=rate, capacity=10)
    stream.join_group()
    for start in range(0, 100, 10):
        put(stream, *range(start, start + 10))
    assert stream.stats().ledger.evicted == 90
    assert len(stream.take(10, timeout=0)) == 10


@pytest.mark.parametrize("max_reads", [0, 2])
def test_a_consumer_group_that_joins_late_does_not_hold_puts_back(client, namespace, max_reads):
    rate = RateLimit.ratio(2.0, min_size=1, error_buffer=4.0)
    stream = stream_of(
        client, namespace, rate=rate, max_reads=max_reads, capacity=20, on_full="error"
    )
    stream.join_group()
    for number in range(30):
        put(stream, number)
        for _ in range(2):
            stream.take(1, timeout=0).ack()
    late = stream_of(client, namespace, group="late")
    late.join_group()
    put(stream, 30)  # as much as without it
    for _ in range(2):
        stream.take(1, timeout=0).ack()
    with pytest.raises(StoreFull):  # from now on its reads count
        for number in range(31, 50):
            put(stream, number)
            for _ in range(2):
                stream.take(1, timeout=0).ack()
    for _ in range(2):
        late.take(2, timeout=0).ack()  # it may read the groups that it found
    put(stream, 50)
    audit(stream)


def test_a_count_does_not_join(client, namespace):
    stream = stream_of(client, namespace, tags=["score"])
    for number in range(4):
        stream.put(numbered(number), tags={"score": number})
    stream.put(numbered(9), tags={"score": 9}, status=Status.ABORTED)
    late = stream_of(client, namespace, group="late")
    assert (late.count(), late.count(Status.ABORTED), late.count(Status.FAILED)) == (4, 1, 0)
    assert late.count(where={"score_gt": 1}) == 2
    assert late.count(Status.ABORTED, where={"$or": [{"score": 9}, {"score": "x"}]}) == 1
    assert late.count(where={"score": {"$ne": 2}}) == 3
    assert late.stats().joined == 0
    stream.take(2, timeout=0).ack()
    assert (late.count(), stream.count()) == (2, 2)
    assert late.count(where={"score_gt": -1}) == 2
    assert late.stats().joined == 0
    late.join_group()
    assert (late.count(), late.count(where={"score_gt": -1})) == (2, 2)
    audit(late)


def test_filtered_groups_are_counted_and_not_stored(client, namespace):
    stream = stream_of(client, namespace, filters=[reward_variance()])
    stream.join_group()
    kept = stream.put_many([[numbered(1), numbered(2)], [numbered(3), numbered(3)]])
    assert len(kept) == 1
    assert stream.put([numbered(5), numbered(5)]) == ()
    ledger = stream.stats().ledger
    assert (ledger.put, ledger.filtered, ledger.waiting) == (3, 2, 1)
    assert ledger.balanced
    audit(stream)
    with stream.writer() as writer:
        writer.put([numbered(5), numbered(5)])
    assert stream.stats().ledger.filtered == 3


def test_filters_see_each_row_of_an_experience(client, namespace):
    def odd(group):
        return bool(int(group[0].reward) % 2)

    stream = stream_of(client, namespace, filters=[odd], max_staleness=5)
    stream.join_group()
    ids = stream.put(make_experience_batch([numbered(n, policy_version=1) for n in range(5)]))
    assert len(ids) == 2
    assert numbers(stream.take(2, timeout=0)) == [1, 3]
    assert stream.stats().ledger.filtered == 3


def test_tags_are_queried_while_groups_wait(client, namespace):
    stream = stream_of(client, namespace, tags=["score", "source"])
    for number, (score, source) in enumerate([(0.1, "a"), (0.9, "b"), (0.7, "a"), (0.95, "a")]):
        stream.put(numbered(number), tags={"score": score, "source": source})
    stream.put(numbered(4))
    audit(stream)
    assert stream.count(where={"score_gt": 0.5}) == 3
    assert stream.count(where={"source": "a", "score_gt": 0.5}) == 2
    lease = stream.take(2, timeout=0, where={"source": {"$eq": "a"}, "score": {"$gt": 0.5}})
    assert numbers(lease) == [2, 3]
    assert stream.count(where={"score_gt": 0.5}) == 1
    lease.release()
    audit(stream)
    assert stream.count(where={"$or": [{"source": "b"}, {"score_lt": 0.2}]}) == 2
    with pytest.raises(BatchTimeout):
        stream.take(3, timeout=0, where={"source": "a", "score_gte": 0.7})
    with pytest.raises(ConfigError, match="score"):
        stream.count(where={"length_gt": 3})
    with pytest.raises(ConfigError):
        stream_of(client, f"{namespace}2").count(where={"score": 1})


def test_a_query_waits_for_matching_groups(client, namespace, only_wakes):
    stream = stream_of(client, namespace, tags=["score"])
    with ThreadPoolExecutor(1) as pool:
        took = pool.submit(stream.take, 2, timeout=60, where={"score_gt": 0.5})
        time.sleep(0.1)
        stream.put(numbered(0), tags={"score": 0.2})
        stream.put(numbered(1), tags={"score": 0.8})
        stream.put(numbered(2), tags={"score": 0.1})
        stream.put(numbered(3), tags={"score": 0.9})
        assert numbers(took.result(timeout=12)) == [1, 3]
    assert numbers(stream.take(2, timeout=0)) == [0, 2]
