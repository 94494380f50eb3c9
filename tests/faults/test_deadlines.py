"""Packets vanish: every call ends within its time, and a lease outlives a frozen connection."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from urllib.parse import urlsplit

import pytest

import redrb
from redrb import (
    BatchTimeout,
    ExperienceStream,
    Mixture,
)
from redrb.connection.deadline import GRACE_S, Deadline
from redrb.connection.stop import Stop
from redrb.errors import RedrbError, StoreUnavailable
from tests.proxy import Proxy
from tests.samples import numbered

RETRY_S = 2.0
LONG_S = 30.0
"""Time for which a client repeats requests where another deadline is to end them before."""

LATE_S = 8.0
"""Time of a busy machine: less than LONG_S, and than a socket waits for a reply (20 s)."""


@pytest.fixture
def proxy(real_url):
    address = urlsplit(real_url)
    assert address.hostname
    assert address.port
    with Proxy(address.hostname, address.port) as proxy:
        yield proxy


@pytest.fixture
def stream(proxy, namespace):
    with (
        redrb.connect(f"redis://127.0.0.1:{proxy.port}", retry_s=RETRY_S) as client,
        ExperienceStream(client, "math", namespace=namespace) as stream,
    ):
        stream.put_many([[numbered(n)] for n in range(8)])
        yield stream
        proxy.thaw()
        stream.clear()


def is_balanced(stream: ExperienceStream) -> bool:
    """Return whether a ledger balances; a busy machine is asked again."""
    for _ in range(10):
        with suppress(StoreUnavailable):
            return stream.stats().ledger.balanced
    return False


def seconds_of(call: Callable[[], object]) -> float:
    """Return how long a call takes to fail because Redis is silent."""
    began = time.monotonic()
    with pytest.raises(StoreUnavailable):
        call()
    return time.monotonic() - began


CALLS: dict[str, tuple[float, Callable[[ExperienceStream], object]]] = {
    "put": (1.0, lambda stream: stream.put(numbered(9), timeout=1.0)),
    "take": (1.0, lambda stream: stream.take(4, timeout=1.0)),
    "look": (1.0, lambda stream: stream.take(4, timeout=0)),
    "leases": (1.0, lambda stream: next(stream.leases(4, timeout=1.0))),
    "stats": (RETRY_S, lambda stream: stream.stats()),
    "count": (RETRY_S, lambda stream: stream.count()),
    "clear": (RETRY_S, lambda stream: stream.clear()),
    "read": (RETRY_S, lambda stream: stream.read([1])),
}


def test_calls_end_in_time_when_packets_vanish(proxy, namespace):
    """Each call has its own client, whose connection was open before."""
    with ExitStack() as scope, ThreadPoolExecutor(len(CALLS)) as pool:
        streams: dict[str, ExperienceStream] = {}
        for name, (least, _) in CALLS.items():
            url = f"redis://127.0.0.1:{proxy.port}"
            retry_s = RETRY_S if least == RETRY_S else LONG_S
            client = scope.enter_context(redrb.connect(url, retry_s=retry_s))
            task = ExperienceStream(client, name, namespace=namespace)
            streams[name] = scope.enter_context(task)
            streams[name].put_many([[numbered(n)] for n in range(8)])
        proxy.freeze()
        calls = {
            name: pool.submit(seconds_of, partial(call, streams[name]))
            for name, (_, call) in CALLS.items()
        }
        seconds = {name: each.result(60) for name, each in calls.items()}
        proxy.thaw()
        most = {name: least + GRACE_S + LATE_S for name, (least, _) in CALLS.items()}
        assert not {name: each for name, each in seconds.items() if each >= most[name]}
        for stream in streams.values():
            assert is_balanced(stream)
            stream.clear()


WAITS: dict[str, Callable[[ExperienceStream], object]] = {
    "put": lambda stream: stream.put(numbered(9), timeout=1.0),
    "take": lambda stream: stream.take(2, timeout=1.0),
    "ranks": lambda stream: stream.take(2, rank=0, world_size=2, step=0, timeout=1.0),
}


def test_calls_that_wait_have_one_deadline_for_all_their_requests(proxy, namespace):
    with ExitStack() as scope, ThreadPoolExecutor(len(WAITS)) as pool:
        streams: dict[str, ExperienceStream] = {}
        for name in WAITS:
            url = f"redis://127.0.0.1:{proxy.port}"
            client = scope.enter_context(redrb.connect(url, retry_s=LONG_S))
            task = ExperienceStream(client, name, namespace=namespace, limit=2)
            streams[name] = scope.enter_context(task)
        streams["put"].put_many([[numbered(n)] for n in range(2)])
        freezing = threading.Timer(0.5, proxy.freeze)
        freezing.start()
        calls = {
            name: pool.submit(seconds_of, partial(call, streams[name]))
            for name, call in WAITS.items()
        }
        seconds = {name: each.result(60) for name, each in calls.items()}
        proxy.thaw()
        most = 1.0 + GRACE_S + LATE_S
        assert not {name: each for name, each in seconds.items() if each >= most}
        for stream in streams.values():
            assert is_balanced(stream)


def test_the_last_part_has_one_deadline_with_the_put_of_its_group(proxy, stream, monkeypatch):
    stream.put_part("a", numbered(9), index=0, of=2)
    stored = stream._parts._stored

    def slowly_stored(*arguments):
        reply = stored(*arguments)
        threading.Event().wait(1.0 + GRACE_S - 0.5)
        proxy.freeze()
        return reply

    monkeypatch.setattr(stream._parts, "_stored", slowly_stored)
    call = lambda: stream.put_part("a", numbered(10), index=1, of=2, timeout=1.0)  # noqa: E731
    # a second deadline would begin after the first has lasted for all but half a second
    assert seconds_of(call) < 1.0 + GRACE_S - 0.5 + 1.0 + GRACE_S
    proxy.thaw()
    assert is_balanced(stream)


def test_a_take_of_a_mixture_has_one_deadline_for_all_its_requests(proxy, namespace):
    with (
        redrb.connect(f"redis://127.0.0.1:{proxy.port}", retry_s=LONG_S) as client,
        ExperienceStream(client, "code", namespace=namespace) as code,
        Mixture(client, {"code": 0.5, "math": 0.5}, namespace=namespace) as mixture,
    ):
        code.put_many([[numbered(n)] for n in range(2)])
        freezing = threading.Timer(0.5, proxy.freeze)
        freezing.start()
        assert seconds_of(lambda: mixture.take(4, timeout=1.0)) < 1.0 + GRACE_S + LATE_S
        proxy.thaw()


def test_a_loop_over_leases_has_one_deadline_for_a_batch(proxy, namespace):
    with (
        redrb.connect(f"redis://127.0.0.1:{proxy.port}", retry_s=LONG_S) as client,
        ExperienceStream(client, "math", namespace=namespace) as stream,
        stream.leases(4, timeout=3.0) as leases,
    ):
        stream.put_many([[numbered(n)] for n in range(8)])
        next(leases)
        time.sleep(0.2)  # the reply to the take after it arrives
        proxy.freeze()
        next(leases)
        proxy.thaw()  # the connection of the third take stays silent
        began = time.monotonic()
        with pytest.raises(BatchTimeout):
            next(leases)
        assert time.monotonic() - began < 3.0 + LATE_S


def test_an_acknowledgement_ends_in_time_and_can_be_repeated(proxy, stream):
    lease = stream.take(4, timeout=5)
    proxy.freeze()
    assert seconds_of(lease.ack) < RETRY_S + GRACE_S + LATE_S
    proxy.thaw()
    lease.ack()
    assert stream.stats().ledger.acked == 4


def test_a_writer_waits_no_longer_than_its_timeout(proxy, stream):
    with stream.writer() as writer:
        writer.put(numbered(1))
        writer.flush(timeout=5)
        proxy.freeze()

        def put_twice():
            writer.put(numbered(2), timeout=1.0)
            writer.flush(timeout=1.0)

        assert seconds_of(put_twice) < 2 * 1.0 + GRACE_S + LATE_S
        proxy.thaw()
        writer.flush(timeout=5)


def test_a_wait_notices_a_frozen_connection(proxy, stream):
    began = time.monotonic()
    leases = stream.leases(4, timeout=3.0)
    next(leases)
    next(leases)
    proxy.freeze()
    with pytest.raises(RedrbError):
        next(leases)
    assert time.monotonic() - began < 3.0 + GRACE_S + 2 * LATE_S
    proxy.thaw()
    leases.close()


def test_closing_ends_in_time(proxy, namespace):
    client = redrb.connect(f"redis://127.0.0.1:{proxy.port}", retry_s=RETRY_S)
    stream = ExperienceStream(client, "math", namespace=namespace)
    stream.put(numbered(1))
    lease = stream.take(1, timeout=5)
    proxy.freeze()
    began = time.monotonic()
    with pytest.raises(StoreUnavailable):
        stream.close()
    assert time.monotonic() - began < RETRY_S + GRACE_S + LATE_S
    client.close()
    del lease


def test_closing_a_mixture_ends_in_time(proxy, namespace):
    client = redrb.connect(f"redis://127.0.0.1:{proxy.port}", retry_s=RETRY_S)
    mixture = Mixture(client, {"math": 0.5, "code": 0.5}, namespace=namespace)
    with pytest.raises(TimeoutError):
        mixture.take(2, timeout=0.1)
    proxy.freeze()
    began = time.monotonic()
    with pytest.raises(StoreUnavailable):
        mixture.close()
    assert time.monotonic() - began < RETRY_S + GRACE_S + LATE_S
    client.close()


def test_a_frozen_connection_costs_a_beat_and_not_the_lease(proxy, real_url, namespace):
    with (
        redrb.connect(f"redis://127.0.0.1:{proxy.port}", retry_s=LONG_S) as client,
        redrb.connect(real_url) as other,
        ExperienceStream(client, "math", namespace=namespace, lease_ms=6000) as mine,
        ExperienceStream(other, "math", namespace=namespace, lease_ms=6000) as theirs,
    ):
        mine.put_many([[numbered(n)] for n in range(4)])
        lease = mine.take(4, timeout=5)
        with pytest.raises(TimeoutError):
            theirs.take(1, timeout=0.1)  # from now on it takes over leases of the dead
        proxy.freeze()
        time.sleep(0.1)
        proxy.thaw()  # new connections work, those that were open stay silent
        with pytest.raises(TimeoutError):
            theirs.take(1, timeout=8.0)
        lease.ack()
        assert mine.stats().ledger.acked == 4
        mine.clear()


def test_a_request_under_way_is_interrupted_when_the_time_to_end_is_up(proxy, namespace):
    with redrb.connect(f"redis://127.0.0.1:{proxy.port}", retry_s=60) as client:
        stream = ExperienceStream(client, "math", namespace=namespace)
        stop = Stop(0.5)
        proxy.freeze()
        threading.Timer(0.2, stop.begin).start()
        with Deadline(budget=stop):
            assert seconds_of(stream.stats) < 0.2 + 0.5 + LATE_S
            for call in (stream.count, stream.stats, stream.clear):
                assert seconds_of(call) < LATE_S / 2
