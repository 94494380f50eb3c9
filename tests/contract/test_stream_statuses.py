"""Statuses: groups of each one wait in a separate pool, and move between pools."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from redrb import BatchTimeout, ConfigError, ExperienceStream, Status
from redrb.connection import Client
from tests.audit import audit, kill_consumer
from tests.samples import numbered, numbers

ORDERS = ["fifo", "lifo", "stalest", "priority", "uniform"]


def stream_of(client: Client, namespace: str, **options: Any) -> ExperienceStream:
    return ExperienceStream(client, "math", namespace=namespace, **options)


def put(stream: ExperienceStream, *these: int, **options: Any) -> tuple[int, ...]:
    return stream.put_many([[numbered(n)] for n in these], **options)


def counts(stream: ExperienceStream) -> dict[Status, int]:
    return {status: count for status, count in stream.counts().items() if count}


@pytest.mark.parametrize("order", ORDERS)
def test_groups_of_each_status_wait_in_a_separate_pool(
    client: Client, namespace: str, order: str
) -> None:
    stream = stream_of(client, namespace, order=order, max_staleness=100)
    stream.join_group()
    put(stream, 0, 1, policy_version=3)
    put(stream, 2, 3, 4, policy_version=3, status=Status.ABORTED)
    put(stream, 5, policy_version=3, status=Status.FILTERED)
    audit(stream)
    assert counts(stream) == {Status.COMPLETED: 2, Status.ABORTED: 3, Status.FILTERED: 1}
    assert (stream.count(), stream.count(Status.ABORTED), len(stream)) == (2, 3, 6)
    with pytest.raises(BatchTimeout) as caught:
        stream.take(3, timeout=0)
    assert caught.value.available == 2
    lease = stream.take(2, timeout=0, status=Status.ABORTED)
    assert set(numbers(lease)) < {2, 3, 4}
    assert counts(stream) == {Status.COMPLETED: 2, Status.ABORTED: 1, Status.FILTERED: 1}
    lease.release()
    audit(stream)
    assert sorted(numbers(stream.take(3, timeout=0, status=Status.ABORTED))) == [2, 3, 4]
    assert sorted(numbers(stream.take(2, timeout=0))) == [0, 1]


@pytest.mark.parametrize(
    ("order", "expected"),
    [("fifo", [0, 1, 2]), ("lifo", [2, 1, 0]), ("stalest", [2, 0, 1]), ("priority", [1, 2, 0])],
)
def test_each_pool_has_the_order_of_the_task(
    client: Client, namespace: str, order: str, expected: list[int]
) -> None:
    stream = stream_of(client, namespace, order=order, max_staleness=100)
    for number, (version, priority) in enumerate([(5, 1.0), (7, 9.0), (2, 3.0)]):
        put(stream, number, policy_version=version, priority=priority, status=Status.ABORTED)
        put(stream, number + 10, policy_version=version, priority=priority)
    assert numbers(stream.take(3, timeout=0, status=Status.ABORTED)) == expected
    assert numbers(stream.take(3, timeout=0)) == [number + 10 for number in expected]


def test_a_groups_status_is_derived_from_its_samples(client: Client, namespace: str) -> None:
    stream = stream_of(client, namespace, order="lifo")
    stream.put([numbered(0), numbered(1, status=Status.ABORTED)])
    stream.put([numbered(2, status=Status.ABORTED), numbered(3, status=Status.FAILED)])
    stream.put([numbered(4, status=Status.FAILED)], status=Status.COMPLETED)
    assert counts(stream) == {Status.ABORTED: 1, Status.FAILED: 1, Status.COMPLETED: 1}
    assert numbers(stream.take(1, timeout=0)) == [4]


def test_a_moved_group_keeps_its_place_and_its_pool(client: Client, namespace: str) -> None:
    stream = stream_of(client, namespace, order="stalest", max_deliveries=2)
    ids = [put(stream, n, policy_version=version)[0] for n, version in enumerate([4, 2, 3])]
    assert stream.move([ids[1], ids[0]], Status.ABORTED) == 2
    audit(stream)
    assert counts(stream) == {Status.ABORTED: 2, Status.COMPLETED: 1}
    assert stream.move([ids[1], ids[1], 999], Status.ABORTED) == 2  # they wait there
    lease = stream.take(2, timeout=0, status=Status.ABORTED)
    assert numbers(lease) == [1, 0]
    assert stream.move([ids[0], ids[2]], Status.FAILED) == 1  # leased groups are left alone
    lease.release()
    audit(stream)
    assert counts(stream) == {Status.ABORTED: 2, Status.FAILED: 1}
    with pytest.raises(ZeroDivisionError), stream.take(2, timeout=0, status=Status.ABORTED):
        raise ZeroDivisionError
    assert counts(stream) == {Status.ABORTED: 2, Status.FAILED: 1}
    stream.take(2, timeout=0, status=Status.ABORTED).ack()
    assert stream.stats().stored == 1
    audit(stream)


def test_a_move_concerns_one_consumer_group(client: Client, namespace: str) -> None:
    first = stream_of(client, namespace, order="lifo")
    other = stream_of(client, namespace, group="other")
    ids = put(first, 0, 1)
    other.join_group()
    first.join_group()
    first.move(ids[:1], Status.FAILED)
    assert counts(first) == {Status.FAILED: 1, Status.COMPLETED: 1}
    assert counts(other) == {Status.COMPLETED: 2}
    assert numbers(other.take(2, timeout=0)) == [1, 0]
    late = stream_of(client, namespace, group="late")
    late.join_group()
    assert counts(late) == {Status.COMPLETED: 2}
    audit(first)


def test_every_group_is_moved_or_taken_once_among_threads(client: Client, namespace: str) -> None:
    """Movers and takers race for the same groups: each is in one place at any time."""
    stream = stream_of(client, namespace, order="stalest")
    ids = put(stream, *range(60), policy_version=1)
    taken: Counter[int] = Counter()

    def move(to: Status) -> int:
        moved = 0
        for start in range(0, 60, 5):
            moved += stream.move(ids[start : start + 5], to)
        return moved

    def take(status: Status) -> None:
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


def test_takes_of_a_status_wait_for_that_status(client: Client, namespace: str) -> None:
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


def test_a_writer_and_a_loop_over_leases_know_statuses(client: Client, namespace: str) -> None:
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


def test_a_plain_task_that_gets_a_status_keeps_all_it_had(client: Client, namespace: str) -> None:
    """Waiting, leased and released groups of two consumer groups are right after the change."""
    first = stream_of(client, namespace, max_deliveries=3, max_bytes=10**6)
    second = stream_of(client, namespace, group="second")
    second.join_group()
    put(first, *range(8))
    gone = first.take(1, timeout=0)
    back = first.take(2, timeout=0)
    held = first.take(2, timeout=0)
    gone.ack()
    back.release()
    with pytest.raises(ZeroDivisionError), first.take(1, timeout=0):
        raise ZeroDivisionError
    theirs = second.take(3, timeout=0)
    before = first.stats().ledger, second.stats().ledger
    put(first, 8, status=Status.ABORTED)
    audit(first)
    for stream, ledger in zip((first, second), before, strict=True):
        now = stream.stats().ledger
        assert (now.put, now.waiting) == (ledger.put + 1, ledger.waiting + 1)
        assert (now.acked, now.leased) == (ledger.acked, ledger.leased)
    assert counts(first) == {Status.COMPLETED: 5, Status.ABORTED: 1}
    held.ack()
    theirs.release()
    audit(first)
    assert numbers(first.take(5, timeout=0)) == [1, 2, 5, 6, 7]
    assert numbers(second.take(8, timeout=0)) == list(range(8))
    audit(first)
    put(second, 9)
    assert numbers(first.take(1, timeout=0)) == [9]
    assert numbers(first.take(1, timeout=0, status=Status.ABORTED)) == [8]


def test_failed_deliveries_of_a_plain_task_count_on(client: Client, namespace: str) -> None:
    stream = stream_of(client, namespace, max_deliveries=2)
    other = stream_of(client, namespace)
    put(stream, 0, 1)
    stream.take(1, timeout=0)
    kill_consumer(stream)
    other.take(2, timeout=0).release()
    put(other, 2, status=Status.FAILED)
    with pytest.raises(ZeroDivisionError), other.take(1, timeout=0):
        raise ZeroDivisionError
    assert numbers(other.take(1, timeout=0)) == [1]
    assert [letter.failed_deliveries for letter in other.dead_letters()] == [2]
    audit(other)


@pytest.mark.parametrize("joined", [True, False])
def test_a_plain_task_with_gaps_becomes_indexed(
    client: Client, namespace: str, joined: bool
) -> None:
    """Evictions leave ids without groups behind: no consumer may wait for them."""
    stream = stream_of(client, namespace, limit=3, on_full="drop_oldest")
    if joined:
        stream.join_group()
    for number in range(5):
        put(stream, number)
    put(stream, 5, status=Status.ABORTED)
    audit(stream)
    assert counts(stream) == {Status.COMPLETED: 2, Status.ABORTED: 1}
    assert numbers(stream.take(2, timeout=0)) == [3, 4]
    assert stream.stats().ledger.leased == 2
    audit(stream)


def test_a_plain_task_that_is_moved_becomes_indexed(client: Client, namespace: str) -> None:
    stream = stream_of(client, namespace)
    ids = put(stream, 0, 1, 2)
    assert counts(stream) == {Status.COMPLETED: 3}
    with pytest.raises(BatchTimeout):
        stream.take(1, timeout=0, status=Status.ABORTED)
    assert stream.move([ids[1]], Status.ABORTED) == 1
    audit(stream)
    put(stream, 3)  # the producer takes the task for a plain one still
    assert numbers(stream.take(3, timeout=0)) == [0, 2, 3]
    assert numbers(stream.take(1, timeout=0, status=Status.ABORTED)) == [1]
    audit(stream)


def test_unknown_statuses_are_refused(client: Client, namespace: str) -> None:
    stream = stream_of(client, namespace)
    (seq,) = put(stream, 0)
    for call in (
        lambda: stream.move([seq], "lost"),  # type: ignore[arg-type]
        lambda: stream.count("lost"),  # type: ignore[arg-type]
        lambda: stream.take(1, timeout=0, status="lost"),  # type: ignore[arg-type]
        lambda: stream.put(numbered(1), status="lost"),  # type: ignore[arg-type]
    ):
        with pytest.raises((ConfigError, ValueError), match="lost"):
            call()
    assert counts(stream) == {Status.COMPLETED: 1}


def test_history_counts_as_archived(client: Client, namespace: str) -> None:
    stream = stream_of(client, namespace, keep_groups=2)
    put(stream, 0, 1, 2)
    put(stream, 3, status=Status.ABORTED)
    stream.take(3, timeout=0).ack()
    assert counts(stream) == {Status.ARCHIVED: 2, Status.ABORTED: 1}
    with pytest.raises(BatchTimeout):
        stream.take(1, timeout=0, status=Status.ARCHIVED)
    audit(stream)


@pytest.mark.parametrize("eviction", ["oldest", "stalest", "last"])
def test_a_capacity_counts_every_status_and_no_history(
    client: Client, namespace: str, eviction: str
) -> None:
    options = {"capacity": 3, "eviction": eviction, "keep_groups": 5, "max_staleness": 9}
    stream = stream_of(client, namespace, **options)
    ids = put(stream, 0, 1, policy_version=1)
    stream.take(2, timeout=0).ack()
    put(stream, 2, 3, 4, status=Status.ABORTED, policy_version=1)
    put(stream, 5, status=Status.FAILED, policy_version=1)
    audit(stream)
    assert counts(stream) == {Status.ABORTED: 2, Status.FAILED: 1, Status.ARCHIVED: 2}
    assert [group.id for group in stream.history()] == list(ids)
    assert numbers(stream.take(2, timeout=0, status=Status.ABORTED)) == [3, 4]
