"""Streams and weights go on after Sentinels made a replica the primary."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import redrb
from redrb.errors import ConfigError, StoreDenied, StoreFull, StoreUnavailable
from tests.samples import numbered, numbers
from tests.sentinels import SERVICE, Watched
from tests.servers import programs


@pytest.fixture(scope="module")
def watched():
    program = next(iter(programs().values()))
    found = Watched(program, replicas=3, password="for-servers", sentinel_password="for-them")
    yield found
    found.close()


def test_wrong_urls_say_what_is_wrong(watched):
    first = watched.hosts.split(",")[0]
    with pytest.raises(ConfigError, match=rf"redis\+sentinel://{first}/SERVICE/0"):
        redrb.connect(f"redis://:for-them@{first}")
    with pytest.raises(ConfigError, match="name of the service"):
        redrb.connect(f"redis+sentinel://{watched.hosts}")
    unknown = watched.url.replace(SERVICE, "other")
    with pytest.raises(StoreUnavailable, match=r"'other': .* no such service"):
        redrb.connect(unknown, connect_timeout=2)
    with pytest.raises(StoreDenied, match=f"the Sentinel {first} answered"):
        redrb.connect(watched.url.replace("for-them", "wrong"), connect_timeout=2)
    with pytest.raises(StoreDenied):
        redrb.connect(watched.url.replace("for-servers", "wrong"), connect_timeout=2)


def test_a_primary_that_evicts_keys_is_refused(watched):
    with redrb.connect(watched.url) as client:
        client.execute("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
        try:
            with pytest.raises(ConfigError, match="has maxmemory-policy allkeys-lru"):
                redrb.connect(watched.url)
        finally:
            client.execute("CONFIG", "SET", "maxmemory-policy", "noeviction")


def test_a_put_waits_for_its_replicas(watched, namespace):
    replicas = [server for server in watched.servers if server is not watched.primary()]
    with (
        redrb.connect(watched.url, retry_s=30, min_replicas=3) as client,
        redrb.ExperienceStream(client, "task", namespace=namespace) as stream,
        redrb.ExperienceStream(client, "task", namespace=namespace, min_replicas=2) as careless,
        redrb.ExperienceStream(
            client, "full", namespace=namespace, limit=1, on_full="error"
        ) as full,
    ):
        stream.put(numbered(1))
        full.put(numbered(1))
        os.kill(replicas[0].pid, signal.SIGSTOP)
        try:
            careless.put(numbered(2))
            with pytest.raises(StoreUnavailable, match="only 2 of 3 replicas") as caught:
                stream.put(numbered(3), timeout=1)
            with pytest.raises(StoreFull):  # nothing is stored, so nothing is to confirm
                full.put(numbered(2), timeout=1)
        finally:
            os.kill(replicas[0].pid, signal.SIGCONT)
        assert caught.value.uncertain
        with stream.writer() as writer:
            writer.put(numbered(4))
        with stream.take(4, timeout=5) as lease:  # the third one was stored, once
            assert numbers(lease) == [1, 2, 3, 4]


def test_an_unplanned_failover_loses_no_put_that_replicas_confirmed(watched, namespace):
    """The primary is killed while several threads put."""
    confirmed: list[int] = []
    with (
        redrb.connect(watched.url, connect_timeout=2, retry_s=30, min_replicas=1) as client,
        redrb.ExperienceStream(client, "task", namespace=namespace) as stream,
        ThreadPoolExecutor(4) as threads,
    ):
        over = threading.Event()

        def put(first):
            for number in range(first, first + 100_000):
                if over.is_set():
                    return
                stream.put(numbered(number))
                confirmed.append(number)

        makers = [threads.submit(put, first) for first in range(0, 400_000, 100_000)]
        while len(confirmed) < 400:
            time.sleep(0.01)
        watched.primary().kill()
        before = len(confirmed)
        while len(confirmed) < before + 400:
            time.sleep(0.01)
            assert not any(maker.done() for maker in makers)
        over.set()
        for maker in makers:
            maker.result()
        with stream.take(len(confirmed), timeout=5) as lease:
            assert sorted(numbers(lease)) == sorted(confirmed)
        assert len(stream) == 0


def replicated(client: redrb.Client) -> None:
    """Wait until a replica has all data: an unplanned failover loses what none has."""
    until = time.monotonic() + 60
    while client.execute("WAIT", 1, 1000) < 1:
        assert time.monotonic() < until, "no replica follows"


def test_puts_and_takes_go_on_after_the_primary_has_died(watched, namespace):
    with redrb.connect(watched.url, connect_timeout=2, retry_s=30) as client:
        assert SERVICE in client.where
        assert "for-" not in client.where
        with redrb.ExperienceStream(client, "task", namespace=namespace) as stream:
            stream.put(numbered(1))
            stream.put(numbered(2))
            replicated(client)
            before = watched.primary()
            before.kill()
            stream.put(numbered(3))
            with stream.take(3, timeout=20) as lease:
                assert numbers(lease) == [1, 2, 3]
            assert watched.primary() is not before
            assert stream.stats().ledger.balanced


def test_a_frozen_primary_costs_seconds_and_nothing_else(watched, namespace):
    with (
        redrb.connect(watched.url, connect_timeout=2, retry_s=30) as client,
        redrb.ExperienceStream(client, "task", namespace=namespace) as stream,
    ):
        stream.put(numbered(1))
        replicated(client)
        before = watched.primary()
        os.kill(before.pid, signal.SIGSTOP)
        try:
            started = time.monotonic()
            stream.put(numbered(2), timeout=25)
            assert time.monotonic() - started < 25
        finally:
            os.kill(before.pid, signal.SIGCONT)
        with stream.take(2, timeout=20) as lease:
            assert numbers(lease) == [1, 2]
