"""Leases that could not be ended while Redis was away, and that nobody has any more.

Their heartbeats requeue them without the garbage collector: it may be off, or have little to do.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

import redrb
from redrb import (
    BatchTimeout,
    ExperienceLoader,
    ExperienceStream,
    Lease,
    Mixture,
    ShardedStream,
    StoreFull,
    StoreUnavailable,
)
from redrb.stream import heartbeat
from redrb.stream.take.hand_back import hand_back
from tests.samples import numbered
from tests.scenes import until
from tests.servers import Server, programs

DURABLE = ("--appendonly", "yes", "--appendfsync", "always")
GROUPS = 4

Way = Callable[[ExperienceStream, Lease], object]


pytestmark = pytest.mark.parametrize("own_server", list(programs())[-1:], indirect=True)


@pytest.fixture(autouse=True)
def _without_garbage_collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(heartbeat, "LONGEST_PERIOD_S", 0.2)  # shorter tests
    gc.disable()
    yield
    gc.enable()


def block(_: ExperienceStream, lease: Lease) -> None:
    with lease:
        pass


def failing_block(_: ExperienceStream, lease: Lease) -> None:
    with lease:
        raise ValueError


WAYS: dict[str, Way] = {
    "ack": lambda _, lease: lease.ack(),
    "some": lambda _, lease: lease.ack(lease.ids[:1]),
    "release": lambda _, lease: lease.release(),
    "fail": lambda _, lease: lease.fail("away"),
    "reject": lambda _, lease: lease.reject("away"),
    "expire": lambda _, lease: lease.expire(),
    "block": block,
    "failing-block": failing_block,
    "failing-block-of-rank-0": failing_block,
    "hand-back": lambda _, lease: hand_back(lease),
    "next-take": lambda stream, lease: stream.take(1, ack=lease, timeout=0.2),
}

ENDED = ("hand-back",)


@pytest.mark.parametrize("kept", [False, True], ids=["dropped", "kept-by-its-error"])
def test_groups_of_a_lease_that_nobody_has_wait_again_when_redis_is_back(
    own_server: Callable[..., Server], namespace: str, kept: bool
) -> None:
    """An error that is kept has the frames of a failed call, and so its lease."""
    ways = {name: way for name, way in WAYS.items() if not kept or name in ENDED}
    server = own_server(*DURABLE)
    with redrb.connect(server.url, retry_s=0.2) as client:
        streams = {name: ExperienceStream(client, name, namespace=namespace) for name in ways}
        for stream in streams.values():
            for number in range(GROUPS):
                stream.put(numbered(number))
        leases = {name: taken(name, stream) for name, stream in streams.items()}
        server.kill()
        errors = []
        for name, way in ways.items():
            try:
                way(streams[name], leases.pop(name))
            except StoreUnavailable as error:
                if kept:
                    errors.append(error)
        server.start()
        for name, stream in streams.items():
            until(lambda stream=stream: waiting(stream) == GROUPS, 20)
            assert stream.stats().ledger.acked == 0, name
        for stream in streams.values():
            stream.close()


def taken(name: str, stream: ExperienceStream) -> Lease:
    rank = {"rank": 0, "world_size": 1, "step": 0} if "rank" in name else {}
    return stream.take(GROUPS, **rank)


def waiting(stream: ExperienceStream) -> int:
    with suppress(StoreUnavailable):
        return len(stream)
    return -1


def full(stream: ExperienceStream) -> None:
    options = {"shards": 1, "limit": 1, "on_full": "error", "namespace": stream.namespace}
    with ShardedStream(stream._task.store.client, "full", **options) as shards:
        for _ in range(2):
            with suppress(StoreFull):
                shards.put(numbered(0))


CALLS: dict[str, Callable[[ExperienceStream], object]] = {
    "len": len,
    "stats": lambda stream: stream.stats(),
    "take": lambda stream: stream.take(1, timeout=0).release(),
    "short-take": lambda stream: short(stream, 100),
    "put": lambda stream: stream.put(numbered(0)),
    "read": lambda stream: stream.read([1]),
    "rank": lambda stream: stream.take(1, rank=0, world_size=1, step=0, timeout=0).release(),
    "forward": lambda stream: stream.take(1, timeout=0).forward(stream, {}),
    "full": full,
}


def short(stream: ExperienceStream, count: int) -> None:
    with suppress(BatchTimeout):
        stream.take(count, timeout=0.01)


@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
def test_calls_after_a_restart_keep_no_lease_of_their_callers(
    own_server: Callable[..., Server],
    namespace: str,
    call: Callable[[ExperienceStream], object],
) -> None:
    """A server that has started again knows no script: the first call of each gets an error."""
    server = own_server()
    with (
        redrb.connect(server.url, retry_s=5) as client,
        ExperienceStream(client, "math", namespace=namespace) as stream,
    ):
        for number in range(GROUPS):
            stream.put(numbered(number))

        def held() -> weakref.ref[object]:
            lease = stream.take(1)
            client.execute("SCRIPT", "FLUSH")
            with suppress(redrb.RedrbError):
                call(stream)
            return weakref.ref(lease._parts[0])

        for _ in range(2):
            assert held()() is None


def closed_loader(stream: ExperienceStream, each: Callable[[], object]) -> None:
    with ExperienceLoader(stream, 1, timeout=0.5) as loader:
        for _ in loader:
            each()


def dropped_loader(stream: ExperienceStream, each: Callable[[], object]) -> None:
    for _ in ExperienceLoader(stream, 1, timeout=0.5):
        each()


def loop(stream: ExperienceStream, each: Callable[[], object]) -> None:
    for _ in stream.leases(1, timeout=0.5):
        each()


def loop_ahead(stream: ExperienceStream, each: Callable[[], object]) -> None:
    for _ in stream.leases(1, timeout=0.5, prefetch=1):
        each()


@pytest.mark.parametrize("run", [loop, loop_ahead, closed_loader, dropped_loader])
def test_batches_of_a_loop_that_failed_wait_again_when_redis_is_back(
    own_server: Callable[..., Server],
    namespace: str,
    run: Callable[[ExperienceStream, Callable[[], object]], None],
) -> None:
    server = own_server(*DURABLE)
    with (
        redrb.connect(server.url, retry_s=0.2) as client,
        ExperienceStream(client, "math", namespace=namespace) as stream,
    ):
        for number in range(GROUPS):
            stream.put(numbered(number))
        begun = itertools.count(1)
        failed = False
        try:
            run(stream, lambda: next(begun) == 2 and server.kill())
        except StoreUnavailable:  # `pytest.raises` would keep it, and it the frames
            failed = True
        server.start()
        assert failed
        until(lambda: waiting(stream) == GROUPS - stream.stats().ledger.acked, 20)


@pytest.mark.parametrize("kind", ["mixture", "sharded"])
def test_parts_and_turns_of_a_take_that_failed_are_free_when_redis_is_back(
    own_server: Callable[..., Server], namespace: str, kind: str
) -> None:
    server = own_server(*DURABLE)
    names = ["a", "b"] if kind == "mixture" else ["math@0", "math@1"]
    with (
        redrb.connect(server.url, retry_s=2) as client,
        ThreadPoolExecutor(2) as pool,
    ):
        tasks = [ExperienceStream(client, name, namespace=namespace) for name in names]

        def opened() -> Mixture | ShardedStream:
            if kind == "mixture":
                return Mixture(client, dict.fromkeys(names, 1), namespace=namespace)
            return ShardedStream(client, "math", shards=2, namespace=namespace)

        first, second = opened(), opened()
        tasks[0].put(numbered(0))
        taken = pool.submit(first.take, 2, timeout=1.5)
        until(lambda: tasks[0].stats().ledger.leased == 1)
        server.kill()
        assert isinstance(taken.exception(20), redrb.RedrbError)
        server.start()
        taken = pool.submit(second.take, 2, timeout=20)
        until(lambda: tasks[0].stats().ledger.leased == 1)
        tasks[1].put(numbered(1))
        with taken.result(30) as lease:
            assert len(lease) == 2
        for each in (first, second, *tasks):
            each.close()
