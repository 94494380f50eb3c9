"""A stream that is closed, or whose client is, refuses puts and takes with a clear error."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import redrb
from redrb import ConfigError, ExperienceStream, WeightPublisher, WeightSubscriber
from redrb.connection.deadline import EXIT_S
from redrb.errors import BatchTimeout, StoreClosed
from tests.audit import audit
from tests.samples import numbered, numbers
from tests.servers import programs


def heartbeat_of(stream: ExperienceStream) -> threading.Thread:
    """Return the thread that says that the stream's consumer lives."""
    heartbeat = stream._consumer._heartbeat
    return heartbeat._thread


def test_a_closed_stream_says_so(client, namespace):
    stream = ExperienceStream(client, "math", namespace=namespace)
    writer = stream.writer()
    stream.put(numbered(1))
    stream.take(1, timeout=0).release()
    heartbeat = heartbeat_of(stream)
    stream.close()
    stream.close()
    calls: list[Callable[[], object]] = [
        lambda: stream.put(numbered(2)),
        lambda: stream.put_many([[numbered(2)]]),
        lambda: writer.put(numbered(2)),
        stream.writer,
        lambda: stream.take(1, timeout=0),
        lambda: stream.leases(1, timeout=0),
        stream.join_group,
        lambda: stream.discard_expired(1),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match="'math' is closed: open another"):
            call()
    assert not heartbeat.is_alive()


def test_methods_that_only_look_work_after_close(client, namespace):
    with ExperienceStream(client, "math", namespace=namespace) as stream:
        (first,) = stream.put(numbered(1))
    assert (len(stream), stream.count(), stream.stats().stored) == (1, 1, 1)
    (found,) = stream.read([first])
    assert numbers(found.items) == [1]
    assert stream.dead_letters() == []
    assert stream.clear() == 1


def test_a_loop_over_leases_ends_when_its_stream_is_closed(client, namespace):
    stream = ExperienceStream(client, "math", namespace=namespace)
    stream.put_many([[numbered(n)] for n in range(4)])
    loop = stream.leases(1, timeout=0)
    next(loop).ack()
    stream.close()
    with pytest.raises(ConfigError, match="is closed"):
        next(loop)
    with ExperienceStream(client, "math", namespace=namespace, lease_ms=200) as other:
        assert numbers(other.take(3, timeout=5)) == [1, 2, 3]
        audit(other)


def test_a_put_that_a_writer_sent_before_close_is_stored(client, namespace):
    stream = ExperienceStream(client, "math", namespace=namespace)
    with stream.writer() as writer:
        writer.put(numbered(1))
        stream.close()
    assert stream.stats().stored == 1


@pytest.mark.long
def test_all_work_ends_when_the_client_is_closed(url, namespace):
    with redrb.connect(url, retry_s=10) as client:
        stream = ExperienceStream(client, "math", namespace=namespace, lease_ms=300)
        stream.put_many([[numbered(n)] for n in range(2)])
        lease = stream.take(1, timeout=0)
        heartbeat = heartbeat_of(stream)
    heartbeat.join(5)
    assert not heartbeat.is_alive()
    began = time.monotonic()
    calls: list[Callable[[], object]] = [
        lambda: client.execute("PING"),
        lease.ack,
        stream.stats,
        lambda: WeightPublisher(client, "actor", namespace=namespace).publish({}),
        lambda: WeightSubscriber(client, "actor", namespace=namespace).wait(timeout=5),
    ]
    for call in calls:
        with pytest.raises(StoreClosed, match="connect again"):
            call()
    for call in (lambda: stream.put(numbered(3)), lambda: stream.take(1, timeout=5)):
        with pytest.raises(ConfigError, match="closed"):
            call()
    assert time.monotonic() - began < 9  # nothing was tried again, for ten seconds each
    with redrb.connect(url) as again, ExperienceStream(again, "math", namespace=namespace) as other:
        assert numbers(other.take(2, timeout=0)) == [0, 1]  # the stream was closed first


def test_a_take_that_waits_ends_when_the_client_is_closed(real_url, namespace):
    with ThreadPoolExecutor(1) as threads:
        with redrb.connect(real_url, retry_s=10) as client:
            stream = ExperienceStream(client, "math", namespace=namespace)
            waiting = threads.submit(stream.take, 1, timeout=30)
            while not stream.stats().consumers_waiting:
                time.sleep(0.01)
        with pytest.raises(StoreClosed):
            waiting.result(30)


def consumers_of(stream: ExperienceStream) -> list[Any]:
    """Return the consumers of the stream's consumer group in Redis."""
    store = stream._task.store
    return list(store.client.execute("XINFO", "CONSUMERS", store.keys.stream, "default"))


def test_takes_that_found_too_little_leave_no_consumers(client, namespace):
    with ExperienceStream(client, "math", namespace=namespace) as lasting:
        lasting.put(numbered(1))
        for _ in range(10):
            stream = ExperienceStream(client, "math", namespace=namespace)
            with stream, pytest.raises(BatchTimeout):
                stream.take(2, timeout=0)
        assert consumers_of(lasting) == []
        prefix = lasting._task.store.keys.prefix
        for kind in ("leases", "consumers"):
            assert not client.execute("EXISTS", f"{prefix}{kind}:default")
        audit(lasting)


@pytest.mark.long
def test_a_dead_consumer_that_found_too_little_is_deleted(client, namespace):
    dead = ExperienceStream(client, "math", namespace=namespace, lease_ms=300)
    with pytest.raises(BatchTimeout):
        dead.take(2, timeout=0)
    heartbeat = dead._consumer._heartbeat
    heartbeat.stop()
    with ExperienceStream(client, "math", namespace=namespace, lease_ms=300) as stream:
        assert len(consumers_of(stream)) == 1
        time.sleep(0.4)
        with pytest.raises(BatchTimeout):
            stream.take(2, timeout=0)
        with pytest.raises(BatchTimeout):
            stream.take(2, timeout=0.5)
        names = [found[1] for found in map(list, consumers_of(stream))]
        assert all(dead._consumer.name.encode() not in name for name in names)


@pytest.mark.long
@pytest.mark.parametrize("own_server", list(programs())[:1], indirect=True)
def test_all_streams_of_a_client_share_the_time_of_its_end(own_server, namespace):
    server, lives = own_server(), []
    with redrb.connect(server.url, retry_s=60) as client:
        for task in "abcde":
            stream = ExperienceStream(client, task, namespace=namespace)
            stream.put_many([[numbered(n)] for n in range(2)])
            lives.append((stream, stream.take(1, timeout=0)))
        os.kill(server.pid, signal.SIGSTOP)
        began = time.monotonic()
        client.close()
        took_s = time.monotonic() - began
        os.kill(server.pid, signal.SIGCONT)
    assert took_s < 3 * EXIT_S  # five streams would spend five times EXIT_S, each with its own
