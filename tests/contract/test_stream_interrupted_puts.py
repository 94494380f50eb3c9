"""Puts that end midway say how many groups are stored; timeouts hold while Redis is away."""

import time

import msgpack
import pytest
from redis.exceptions import ConnectionError as Broken

from redrb import ConfigError, ExperienceStream, StoreUnavailable
from redrb.connection import deadline
from redrb.errors import EncodeError
from tests.samples import numbered


def test_the_error_of_an_outage_midway_has_the_number_of_stored_groups(
    client, namespace, monkeypatch
):
    stream = ExperienceStream(client, "math", namespace=namespace)
    exchange, calls = client.exchange, []

    def once_only(pipeline):
        calls.append(pipeline)
        if len(calls) > 1:
            raise Broken("Error 111 connecting to nowhere.")
        return exchange(pipeline)

    monkeypatch.setattr(client, "exchange", once_only)
    monkeypatch.setattr(client, "retry_s", 0.1)
    with pytest.raises(StoreUnavailable) as caught:
        stream.put_many([[numbered(n)] for n in range(64)])
    assert caught.value.stored == 32
    assert not caught.value.uncertain
    assert "32 groups were stored before this, of 64." in caught.value.__notes__
    assert stream.stats().ledger.put == 32


def test_a_repeated_put_whose_time_is_up_in_pages_may_be_stored(
    client, namespace, monkeypatch, pages
):
    """Its first attempt was stored, and the second one is refused before it can be recognized."""
    pages(orphans=3)
    monkeypatch.setattr(deadline, "PAGES_S", 0.0)
    stream = ExperienceStream(client, "math", namespace=namespace)
    stream.join_group()
    stream.put(numbered(0))
    exchange, calls = client.exchange, []

    def losing_the_first_reply(pipeline):
        calls.append(pipeline)
        replies = exchange(pipeline)
        if len(calls) > 1:
            return replies
        for _ in range(10):  # of the failed puts of others
            client.execute("XADD", stream._task.store.keys.stream, "*", "g", b"of a failed put")
        raise Broken("Connection closed by server.")

    monkeypatch.setattr(client, "exchange", losing_the_first_reply)
    with pytest.raises(StoreUnavailable, match="done in pages") as caught:
        stream.put(numbered(1), timeout=0)
    assert caught.value.stored == 0
    assert caught.value.uncertain
    assert stream.stats().ledger.put == 2


def test_the_error_of_a_too_large_group_has_the_number_of_stored_groups(client, namespace):
    stream = ExperienceStream(client, "math", namespace=namespace, max_bytes=4000)
    large = numbered(9, extras={"text": "x" * 5000})
    with pytest.raises(ConfigError, match="larger than max_bytes") as caught:
        stream.put_many([[numbered(0)], [numbered(1)], [large]])
    assert caught.value.stored == stream.stats().stored == 2


def test_an_empty_group_among_others_stores_nothing(client, namespace):
    stream = ExperienceStream(client, "math", namespace=namespace)
    with pytest.raises(EncodeError, match="group 1 has 0 samples"):
        stream.put_many([[numbered(0)], [], [numbered(1)]])
    assert stream.stats().stored == 0
    assert stream.put([]) == ()


@pytest.mark.long
@pytest.mark.parametrize("operation", ["take", "put"])
def test_a_timeout_holds_while_redis_is_away(client, namespace, monkeypatch, operation):
    stream = ExperienceStream(client, "math", namespace=namespace)

    def away(pipeline):
        raise Broken("Error 111 connecting to nowhere.")

    monkeypatch.setattr(client, "exchange", away)
    started = time.monotonic()
    with pytest.raises(StoreUnavailable):
        if operation == "take":
            stream.take(1, timeout=0.3)
        else:
            stream.put(numbered(1), timeout=0.3)
    assert time.monotonic() - started < 9  # the client's time is ten seconds


def test_closing_a_stream_leaves_no_producer_behind(client, namespace):
    stream = ExperienceStream(client, "math", namespace=namespace)
    stream.put(numbered(1))
    puts = stream._task.store.keys.puts
    counters = 4
    assert client.execute("HLEN", puts) == counters + 1
    stream.close()
    assert client.execute("HLEN", puts) == counters


def test_a_producer_whose_put_was_interrupted_is_remembered(client, namespace, monkeypatch):
    """The broken attempt may arrive after the stream was closed: it must change nothing."""
    stream = ExperienceStream(client, "math", namespace=namespace)
    exchange, sent = client.exchange, []

    def lost_once(pipeline):
        sent.append(pipeline)
        if len(sent) == 1:
            raise Broken("Connection closed by server.")
        return exchange(pipeline)

    monkeypatch.setattr(client, "exchange", lost_once)
    stream.put(numbered(1))
    stream.close()
    late = exchange(sent[0])[-1]
    assert msgpack.unpackb(late[-1])["outcome"] == "again"
    assert stream.stats().stored == 1
