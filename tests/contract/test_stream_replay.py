"""Replay: filters, and consumer groups that begin late."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from redrb import (
    BatchTimeout,
    ConfigError,
    ExperienceStream,
    Status,
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
