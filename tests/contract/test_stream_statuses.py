"""Statuses: groups of each one wait in a separate pool, and move between pools."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from redrb import BatchTimeout, ExperienceStream, Status
from redrb.connection import Client
from tests.audit import audit
from tests.samples import numbered, numbers


def stream_of(client: Client, namespace: str, **options: Any) -> ExperienceStream:
    return ExperienceStream(client, "math", namespace=namespace, **options)


def put(stream: ExperienceStream, *these: int, **options: Any) -> tuple[int, ...]:
    return stream.put_many([[numbered(n)] for n in these], **options)


def counts(stream: ExperienceStream) -> dict[Status, int]:
    return {status: count for status, count in stream.counts().items() if count}


def test_a_groups_status_is_derived_from_its_samples(client, namespace):
    stream = stream_of(client, namespace, order="lifo")
    stream.put([numbered(0), numbered(1, status=Status.ABORTED)])
    stream.put([numbered(2, status=Status.ABORTED), numbered(3, status=Status.FAILED)])
    stream.put([numbered(4, status=Status.FAILED)], status=Status.COMPLETED)
    assert counts(stream) == {Status.ABORTED: 1, Status.FAILED: 1, Status.COMPLETED: 1}
    assert numbers(stream.take(1, timeout=0)) == [4]


@pytest.mark.parametrize("status", Status)
def test_groups_of_every_status_are_put_moved_and_taken(client, namespace, status):
    stream = stream_of(client, namespace)
    ids = put(stream, 0, 1)
    assert stream.move(ids[:1], status) == 1
    put(stream, 2, status=status)
    stream.move(ids[1:], Status.ABORTED if status is Status.COMPLETED else Status.COMPLETED)
    assert stream.count(status) == 2
    with stream.take(2, timeout=0, status=status) as lease:
        assert numbers(lease) == [0, 2]
    audit(stream)


def test_every_group_is_moved_or_taken_once_among_threads(client, namespace):
    """Movers and takers race for the same groups: each is in one place at any time."""
    stream = stream_of(client, namespace, order="stalest")
    ids = put(stream, *range(60), policy_version=1)
    taken: Counter[int] = Counter()

    def move(to):
        moved = 0
        for start in range(0, 60, 5):
            moved += stream.move(ids[start : start + 5], to)
        return moved

    def take(status):
        for _ in range(12):
            try:
                with stream.take(3, timeout=0, at_least=1, status=status) as lease:
                    taken.update(lease.ids)
            except BatchTimeout:
                continue

    with ThreadPoolExecutor(4) as pool:
        tasks: list[Future[Any]] = [
            pool.submit(move, Status.ABORTED),
            pool.submit(move, Status.FAILED),
            pool.submit(take, Status.COMPLETED),
            pool.submit(take, Status.ABORTED),
        ]
        while not all(task.done() for task in tasks):
            assert stream.stats().ledger.balanced
        for task in tasks:
            task.result()
    left = stream.counts()
    assert sum(left.values()) + len(taken) == 60
    ledger = stream.stats().ledger
    assert (ledger.acked, ledger.waiting) == (len(taken), 60 - len(taken))
    audit(stream)
    for status in filter(left.get, left):
        with stream.take(left[status], timeout=0, status=status) as lease:
            taken.update(lease.ids)
    assert taken == Counter(ids)
    audit(stream)


def test_takes_of_a_status_wait_for_that_status(client, namespace):
    stream = stream_of(client, namespace, order="lifo")
    stream.join_group()
    with ThreadPoolExecutor(3) as pool:
        aborted = pool.submit(stream.take, 2, timeout=20, status=Status.ABORTED)
        failed = pool.submit(stream.take, 1, timeout=20, status=Status.FAILED)
        while stream.stats().consumers_waiting < 2:
            pass
        ids = put(stream, 0, 1, 2)
        assert not aborted.done()
        put(stream, 3, status=Status.ABORTED)
        assert stream.move(ids[:1], Status.ABORTED) == 1
        assert numbers(aborted.result(timeout=30)) == [3, 0]
        assert stream.move(ids[1:2], Status.FAILED) == 1
        assert numbers(failed.result(timeout=30)) == [1]
    assert counts(stream) == {Status.COMPLETED: 1}
    audit(stream)


def test_a_writer_and_a_loop_over_leases_know_statuses(client, namespace):
    stream = stream_of(client, namespace)
    stream.join_group()
    with stream.writer() as writer:
        for number in range(6):
            status = Status.ABORTED if number % 2 else Status.COMPLETED
            writer.put(numbered(number), status=status)
    assert counts(stream) == {Status.COMPLETED: 3, Status.ABORTED: 3}
    seen: list[list[int]] = []
    with pytest.raises(BatchTimeout):
        for lease in stream.leases(1, timeout=0, status=Status.ABORTED):
            seen.append(numbers(lease))
    assert seen == [[1], [3], [5]]
    audit(stream)
    for lease in stream.leases(2, timeout=0, at_least=1):
        assert numbers(lease) == [0, 2]
        lease.ack()
        break
    assert counts(stream) == {Status.COMPLETED: 1}
    audit(stream)
