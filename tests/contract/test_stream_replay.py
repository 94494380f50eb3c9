"""Replay: filters, history, and consumer groups that begin late."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from redrb import (
    BatchTimeout,
    ConfigError,
    ExperienceStream,
    Status,
    StoreFull,
    make_experience_batch,
    reward_variance,
)
from redrb.connection import Client
from tests.audit import audit
from tests.samples import numbered, numbers

WOKEN_S = 10.0
"""Time for a waiter that is woken: less than LOOK_AGAIN_S of `only_wakes`."""


def stream_of(client: Client, namespace: str, **options: Any) -> ExperienceStream:
    return ExperienceStream(client, "replay", namespace=namespace, **options)


def put(stream: ExperienceStream, *these: int, **options: Any) -> tuple[int, ...]:
    return stream.put_many([[numbered(n)] for n in these], **options)


def test_a_count_does_not_join(client, namespace):
    stream = stream_of(client, namespace, tags=["score"], keep_groups=5)
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
    assert (late.count(), late.count(Status.ARCHIVED), stream.count(Status.ARCHIVED)) == (2, 2, 2)
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


def test_acknowledged_groups_stay_readable(client, namespace):
    stream = stream_of(client, namespace, keep_groups=3, limit=4)
    stream.join_group()
    ids = put(stream, 0, 1, 2, 3)
    before = datetime.now(UTC)
    for _ in range(4):
        with stream.take(1, timeout=0):
            pass
        audit(stream)
    stats = stream.stats()
    assert (stats.stored, stats.archived, stats.ledger.acked) == (0, 3, 4)
    assert stream.count(Status.ARCHIVED) == 3
    kept = list(stream.history())
    assert [group.id for group in kept] == list(ids[1:])
    assert [numbers(group.items) for group in kept] == [[1], [2], [3]]
    late = before + timedelta(seconds=60)
    assert all(
        group.archived_at and abs(group.archived_at - before) < late - before for group in kept
    )
    assert list(stream.history(since=late)) == []
    assert len(list(stream.history(until=late))) == 3
    gone, here = stream.read([ids[0], ids[3]])
    assert gone is None
    assert numbers(here.items) == [3]
    put(stream, 4, 5, 6, 7)  # history takes no room
    audit(stream)


@pytest.mark.long
def test_history_beyond_its_period_is_deleted_at_the_next_call(client, namespace):
    stream = stream_of(client, namespace, keep="1s")
    ids = put(stream, 0, 1, 2)
    calls: list[Callable[[], object]] = [
        lambda: put(stream, 9),
        lambda: stream.take(1, timeout=0),
        lambda: stream.read(ids[:1]),
        lambda: list(stream.history()),
    ]
    for call, expected in zip(calls, [(5,), None, [None], []], strict=True):
        put(stream, 3)
        stream.take(1, timeout=0).ack()
        assert stream.stats().archived == 1
        time.sleep(1.05)
        assert call() == expected or expected is None
        assert stream.stats().archived == 0
    audit(stream)


@pytest.mark.parametrize("on_full", ["block", "error", "drop_oldest"])
def test_history_gives_way_to_puts_that_need_its_bytes(client, namespace, on_full):
    size = stream_of(client, f"{namespace}2", max_bytes=10**6)
    size.put(numbered(0))
    nbytes = size.stats().bytes_put
    stream = stream_of(
        client, namespace, max_bytes=6 * nbytes, keep_groups=100, limit=20, on_full=on_full
    )
    stream.join_group()
    for start in range(0, 30, 3):
        put(stream, start, start + 1, start + 2, timeout=1)
        stream.take(3, timeout=0).ack()
        audit(stream)
    assert [numbers(group.items) for group in stream.history()] == [[n] for n in range(24, 30)]
    with stream.writer() as writer:
        for number in range(30, 36):
            writer.put(numbered(number), timeout=1)
    assert stream.stats().archived == 0
    audit(stream)
    if on_full != "drop_oldest":
        with pytest.raises(StoreFull) as caught:  # waiting groups are not evicted
            put(stream, 36, timeout=0.05)
        assert caught.value.reason == "max_bytes"
    stream.take(2, timeout=0).ack()
    assert stream.stats().archived == 2
    put(stream, 37, timeout=1)
    assert stream.stats().archived == 1
    again = stream_of(client, namespace, group="again")
    again.join_group(start=1)  # the history waits again
    audit(stream)


BOTH = (Status.COMPLETED, Status.ABORTED)


def _leave(other: ExperienceStream, how: str) -> None:
    """Let a consumer group be done with all groups."""
    if how == "drop":
        other.drop_group()
        return
    if how == "expire":
        other.expire(100, max_staleness=0, statuses=BOTH)
        return
    for status in BOTH:
        while waiting := other.counts()[status]:
            lease = other.take(min(7, waiting), status=status, timeout=0)
            if how == "fail":
                with suppress(ZeroDivisionError), lease:
                    raise ZeroDivisionError
            elif how == "reject":
                lease.reject("bad")
            else:
                getattr(lease, how.removesuffix("_leased"))()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", [2, None])
@pytest.mark.parametrize("how", ["drop", "expire", "expire_leased", "reject", "fail"])
@pytest.mark.parametrize("order", ["lifo", "stalest", "priority"])
def test_which_groups_stay_in_the_history_is_decided_by_their_acknowledgement(
    client, namespace, pages, order, how, page
):
    """Not by the order of the task, nor by how and in which pages others are done with them."""
    if page is not None:
        pages(ended_of_group=page, expired=page, failed=page, copied_bytes=1)
    dice = random.Random(f"{order} {how} {page}")
    for count in (1, page, page + 1, 60 * page) if page else (33, 320 if how == "drop" else 66):
        shared: dict[str, Any] = {"task": f"replay{count}", "namespace": namespace}
        shared |= {"order": order, "keep_groups": 5, "max_staleness": 200, "max_deliveries": 1}
        with (
            ExperienceStream(client, group="a", **shared) as other,
            ExperienceStream(client, group="b", **shared) as stream,
        ):
            for each in (other, stream):
                each.join_group()
            for number in range(count):
                stream.put(
                    numbered(number),
                    policy_version=dice.randrange(90),
                    status=dice.choice(BOTH),
                    **({"priority": dice.random()} if order == "priority" else {}),
                )
            acknowledged: list[int] = []
            for status in BOTH:
                while waiting := stream.counts()[status]:
                    lease = stream.take(dice.randint(1, min(9, waiting)), status=status, timeout=0)
                    acknowledged += sorted(lease.ids)
                    lease.ack()
                    time.sleep(0.0015)  # the next ones are later
            _leave(other, how)
            assert len(acknowledged) == count
            assert [group.id for group in stream.history()] == acknowledged[-5:]


def test_history_is_read_in_pages(client, namespace):
    stream = stream_of(client, namespace, keep_groups=500)
    put(stream, *range(200))
    stream.take(200, timeout=0).ack()
    assert [numbers(group.items)[0] for group in stream.history()] == list(range(200))
