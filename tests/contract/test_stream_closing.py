"""A closed stream puts and takes nothing more, and says so."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from redrb import ConfigError, ExperienceStream
from redrb.connection import Client
from tests.audit import audit
from tests.samples import numbered, numbers


def test_a_closed_stream_says_so(client: Client, namespace: str) -> None:
    stream = ExperienceStream(client, "math", namespace=namespace)
    writer = stream.writer()
    stream.put(numbered(1))
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
    assert not [thread for thread in threading.enumerate() if thread.name == "heartbeat"]


def test_what_looks_goes_on_after_close(client: Client, namespace: str) -> None:
    with ExperienceStream(client, "math", namespace=namespace) as stream:
        (first,) = stream.put(numbered(1))
    assert (len(stream), stream.count(), stream.stats().stored) == (1, 1, 1)
    (found,) = stream.read([first])
    assert found is not None
    assert numbers(found.items) == [1]
    assert stream.dead_letters() == []
    assert stream.clear() == 1


def test_a_loop_over_leases_ends_when_its_stream_is_closed(client: Client, namespace: str) -> None:
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


def test_what_a_writer_has_sent_before_close_is_in(client: Client, namespace: str) -> None:
    stream = ExperienceStream(client, "math", namespace=namespace)
    with stream.writer() as writer:
        writer.put(numbered(1))
        stream.close()
    assert stream.stats().stored == 1
