"""Batches that were taken ahead: the bound of staleness holds when a batch is handed over."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from redrb import BatchTimeout, ExperienceLoader, ExperienceStream, Lease, Status
from redrb.connection import Client
from redrb.errors import StoreUnavailable
from tests.audit import audit
from tests.samples import numbered, numbers
from tests.scenes import until

pytestmark = pytest.mark.long  # the same requests as test_stream*.py

BATCH = 4

Versions = Iterator[list[int | None]]
Reader = Callable[[ExperienceStream, int], Versions]


def opened(client: Client, namespace: str, **options: Any) -> ExperienceStream:
    return ExperienceStream(client, "math", namespace=namespace, limit=64, **options)


@contextmanager
def maker(client: Client, namespace: str) -> Iterator[list[int]]:
    """Put groups of the version in the list yielded, until the block ends."""
    version, over = [0], threading.Event()

    def make() -> None:
        with ExperienceStream(client, "math", namespace=namespace) as stream:
            number = 0
            while not over.is_set():
                if len(stream) < 4 * BATCH:
                    stream.put(numbered(number), policy_version=version[0])
                    number += 1
                else:
                    over.wait(0.002)

    thread = threading.Thread(target=make)
    thread.start()
    try:
        yield version
    finally:
        over.set()
        thread.join()


def of_leases(stream: ExperienceStream, steps: int) -> Versions:
    leases = stream.leases(BATCH, timeout=20, prefetch=1)
    for _ in range(steps):
        lease = next(leases)
        yield lease.policy_versions
    lease.ack()
    leases.close()


def of_loader(prefetch: int) -> Reader:
    def read(stream: ExperienceStream, steps: int) -> Versions:
        with ExperienceLoader(stream, BATCH, steps=steps, prefetch=prefetch, timeout=20) as loader:
            for batch in loader:
                assert len(batch) == BATCH
                yield loader.lease.policy_versions

    return read


READERS: dict[str, Reader] = {
    "leases": of_leases,
    "loader": of_loader(2),
    "loader without prefetch": of_loader(0),
}


def oldest(versions: Iterable[int | None]) -> int:
    return min(version for version in versions if version is not None)


@pytest.mark.parametrize(
    ("reader", "bound"),
    [("leases", 0), ("loader", 0), ("loader", 2), ("loader without prefetch", 0)],
)
def test_no_batch_is_staler_than_the_bound_when_it_is_handed_over(client, namespace, reader, bound):
    steps = 12
    with (
        opened(client, namespace, max_staleness=bound) as stream,
        maker(client, namespace) as current,
    ):
        stream.join_group()
        staleness = []
        for versions in READERS[reader](stream, steps):
            staleness.append(current[0] - oldest(versions))
            time.sleep(0.02)  # a step, in which the next batches are taken
            current[0] += 1
            stream.advance(current[0])
        assert len(staleness) == steps
        assert max(staleness) <= bound
        ledger = stream.stats().ledger
        assert ledger.balanced
        assert ledger.acked == steps * BATCH


def ahead(stream: ExperienceStream, versions: list[int]) -> Lease:
    """Put and take groups of these versions, of which the newest is current."""
    stream.join_group()
    stream.advance(max(versions))
    for number, version in enumerate(versions):
        stream.put(numbered(number), policy_version=version)
    return stream.take(len(versions), timeout=0)


def test_a_batch_that_was_taken_ahead_and_is_too_stale_now_is_not_handed_over(client, namespace):
    with opened(client, namespace, max_staleness=0) as stream:
        stream.put_many([[numbered(n)] for n in range(2 * BATCH)], policy_version=0)
        leases = stream.leases(BATCH, timeout=20, prefetch=1)
        next(leases)
        until(lambda: stream.stats().ledger.leased == 2 * BATCH)
        stream.advance(1)
        stream.put_many([[numbered(n)] for n in range(BATCH)], policy_version=1)
        lease = next(leases)
        assert lease.policy_versions == [1] * BATCH
        lease.ack()
        leases.close()


def test_groups_that_are_too_stale_expire_and_the_others_wait(client, namespace):
    stream = opened(client, namespace, max_staleness=1)
    lease = ahead(stream, [5, 6, 6])
    assert stream.is_fresh(lease)
    stream.advance(7)
    assert not stream.is_fresh(lease)
    assert not lease
    audit(stream)
    ledger = stream.stats().ledger
    assert (ledger.expired, ledger.waiting, ledger.leased) == (1, 2, 0)
    assert numbers(stream.take(2, timeout=0)) == [1, 2]


def test_the_rule_of_the_newest_token_counts_too(client, namespace):
    stream = opened(client, namespace, max_token_staleness=0)
    lease = ahead(stream, [5, 5])
    stream.advance(6)
    assert not stream.is_fresh(lease)
    assert stream.stats().ledger.expired == 2


def test_expired_groups_that_a_task_keeps_may_be_taken(client, namespace):
    stream = opened(client, namespace, max_staleness=0, on_expired="keep")
    lease = ahead(stream, [5, 5])
    stream.advance(6)
    assert not stream.is_fresh(lease)
    kept = stream.take(2, status=Status.EXPIRED, timeout=0)
    assert stream.is_fresh(kept)
    kept.ack()
    assert stream.stats().ledger.acked == 2


def test_a_task_without_a_bound_sends_nothing(client, namespace, monkeypatch):
    stream = opened(client, namespace, order="stalest")
    lease = ahead(stream, [5])
    monkeypatch.setattr(stream._consumer, "recheck", None)
    assert stream.is_fresh(lease)


def test_the_end_of_data_is_a_timeout_also_when_batches_were_returned(client, namespace):
    with opened(client, namespace, max_staleness=0) as stream:
        stream.join_group()
        stream.advance(1)
        for number in range(3 * BATCH):
            stream.put(numbered(number), policy_version=1)
        seen = 0
        with (
            pytest.raises(BatchTimeout),
            ExperienceLoader(stream, BATCH, prefetch=2, timeout=0.3) as loader,
        ):
            for _ in loader:
                seen += 1
                end = time.monotonic() + 5
                while loader.ready < 2 and time.monotonic() < end:
                    time.sleep(0.002)
                stream.advance(2)
        ledger = stream.stats().ledger
        assert (seen, ledger.acked, ledger.expired) == (1, BATCH, 2 * BATCH)


def test_a_check_waits_for_redis_as_a_batch_does(client, namespace, monkeypatch, caplog):
    with opened(client, namespace, max_staleness=0) as stream:
        stream.join_group()
        stream.advance(1)
        for number in range(2 * BATCH):
            stream.put(numbered(number), policy_version=1)
        is_fresh, failures = stream._taker.is_fresh, iter([False, True, True])

        def broken(*arguments):
            if next(failures, False):
                raise StoreUnavailable("gone", where="here")
            return is_fresh(*arguments)

        monkeypatch.setattr(stream._taker, "is_fresh", broken)
        with ExperienceLoader(stream, BATCH, steps=2, timeout=20) as loader:
            assert len(list(loader)) == 2
        assert caplog.text.count("the staleness of a batch cannot be checked yet: gone") == 1
