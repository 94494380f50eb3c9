"""Leases belong to live consumers: heartbeats, takeovers, dead letters."""

from __future__ import annotations

import gc
import logging
import threading
import time

import pytest
import redis

from redrb import BatchTimeout, ExperienceStream, LeaseLost
from redrb.codec import EncodedGroup
from redrb.experience import Status
from redrb.stream.put.batch import PutBatch
from redrb.stream.take.calls import Pulse
from tests.audit import audit, kill_consumer
from tests.samples import numbered, numbers
from tests.scenes import silence


@pytest.mark.long
def test_a_heartbeat_keeps_a_lease_longer_than_lease_ms(open_stream):
    slow, other = open_stream(lease_ms=300), open_stream(lease_ms=300)
    slow.put(numbered(1))
    lease = slow.take(1, timeout=0)
    with pytest.raises(BatchTimeout):
        other.take(1, timeout=0.9)
    lease.ack()
    assert slow.stats().taken_over == 0


@pytest.mark.long
@pytest.mark.parametrize(
    "end",
    [
        lambda _, lease: lease.ack(),
        lambda _, lease: lease.release(),
        lambda stream, lease: stream.take(1, timeout=0, ack=lease),
    ],
    ids=["ack", "release", "take"],
)
def test_a_waiting_take_takes_over_when_a_heartbeat_stops(open_stream, end):
    dead, other = open_stream(lease_ms=200), open_stream()
    dead.put_many([[numbered(n)] for n in range(3)])
    lost = dead.take(2, timeout=0)
    dead._consumer._heartbeat.stop()
    lease = other.take(3, timeout=5)
    assert numbers(lease) == [0, 1, 2]
    assert other.stats().taken_over == 2
    with pytest.raises(
        LeaseLost, match=r"silent for [0-9.]+ s, longer than lease_ms=200"
    ) as caught:
        end(dead, lost)
    assert caught.value.ids == (1, 2)
    assert caught.value.task == "math"
    lease.ack()
    assert other.stats().ledger.acked == 3


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("math", "give a larger lease_ms"), ("rows:actor", "split such calls: .* no setting")],
)
def test_a_silence_says_what_this_user_can_change(client, namespace, name, remedy):
    def opened() -> ExperienceStream:
        return ExperienceStream(client, name, namespace=namespace, lease_ms=200)

    with opened() as dead, opened() as other:
        dead.put(numbered(1))
        lease = dead.take(1, timeout=0)
        dead._consumer._heartbeat.stop()
        other.take(1, timeout=5).ack()
        with pytest.raises(LeaseLost, match=f"If that is usual, {remedy}"):
            lease.ack()


def test_a_loss_that_no_silence_explains_says_so(open_stream):
    late, other = open_stream(), open_stream()
    late.put(numbered(1))
    lease = late.take(1, timeout=0)
    kill_consumer(late)
    other.take(1, timeout=0).ack()
    with pytest.raises(LeaseLost, match=r"never silent for longer than \d+\.\d s .lease_ms=30000"):
        lease.ack()


def test_an_error_in_the_block_of_a_lost_lease_is_the_one_that_is_raised(open_stream):
    late, other = open_stream(), open_stream()
    late.put(numbered(1))

    def train():
        with late.take(1, timeout=0):
            kill_consumer(late)
            other.take(1, timeout=0)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()


def test_a_heartbeat_takes_over_too(open_stream):
    dead, other = open_stream(), open_stream(lease_ms=200)
    dead.put_many([[numbered(n)] for n in range(2)])
    lease = other.take(1, timeout=0)
    dead.take(1, timeout=0)
    kill_consumer(dead)
    deadline = time.monotonic() + 30
    while other.stats().taken_over == 0:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert len(other) == 1
    lease.ack()


def test_a_group_whose_deliveries_fail_too_often_becomes_a_dead_letter(open_stream):
    watcher = open_stream(max_deliveries=3)
    watcher.put([numbered(1), numbered(2)])
    for _ in range(3):
        dead = open_stream()
        dead.take(1, timeout=0)
        kill_consumer(dead)
    with pytest.raises(BatchTimeout):
        watcher.take(1, timeout=0)
    (letter,) = watcher.dead_letters()
    assert letter.failed_deliveries == letter.deliveries == 3
    assert (letter.consumer, letter.exception) == (dead.consumer, None)
    assert "3 times" in letter.reason
    assert numbers(letter.items) == [1, 2]
    stats = watcher.stats()
    assert (stats.ledger.dead, stats.stored, stats.dead_letters) == (1, 0, 1)


def test_groups_of_a_dropped_lease_are_requeued(open_stream, caplog):
    stream, other = open_stream(lease_ms=6000), open_stream()
    stream.put_many([[numbered(n)] for n in range(2)])
    lease = stream.take(2, timeout=0)
    with caplog.at_level(logging.WARNING, "redrb"):
        del lease
        gc.collect()
        assert numbers(other.take(2, timeout=30)) == [0, 1]
    assert "dropped without ack" in caplog.text
    assert other.stats().taken_over == 0
    assert other.dead_letters() == []


@pytest.mark.long
@pytest.mark.parametrize("trouble", ["scripts are new to the server", "a connection breaks"])
def test_a_dropped_lease_needs_no_garbage_collection(open_stream, client, monkeypatch, trouble):
    """What was raised on the way to a lease holds the frames that hold the lease."""
    stream, other = open_stream(lease_ms=200), open_stream()
    stream.put([numbered(0)])
    if trouble == "a connection breaks":
        exchange, breaks = client.exchange, [redis.ConnectionError("broken"), None]

        def break_once(pipeline):
            if breaks and (error := breaks.pop(0)):
                raise error
            return exchange(pipeline)

        monkeypatch.setattr(client, "exchange", break_once)
    else:
        client.execute("SCRIPT", "FLUSH")
    gc.collect()
    gc.disable()
    try:
        lease = stream.take(1, timeout=1)
        del lease
        assert numbers(other.take(1, timeout=5)) == [0]
    finally:
        gc.enable()


def test_groups_that_a_dropped_lease_had_released_stay_with_their_new_consumer(open_stream):
    stream, other = open_stream(), open_stream()
    stream.put_many([[numbered(n)] for n in range(2)])
    lease = stream.take(2, timeout=0)
    lease.release([1])
    taken = other.take(1, timeout=0)
    silence(stream)
    del lease
    gc.collect()
    stream._consumer.beat()
    audit(stream)
    assert other.stats().ledger.leased == 1
    taken.ack()
    assert numbers(other.take(1, timeout=0)) == [1]


@pytest.mark.long
def test_a_dropped_stream_has_no_heartbeat(client, namespace, monkeypatch):
    stream = ExperienceStream(client, "math", namespace=namespace, lease_ms=100)
    beaten = threading.Event()
    monkeypatch.setattr(stream._consumer, "_renew", lambda: beaten.set() or Pulse(outcome="held"))
    with pytest.raises(BatchTimeout):
        stream.take(1, timeout=0)
    thread = stream._consumer._heartbeat._thread
    assert beaten.wait(5)
    del stream
    monkeypatch.undo()
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()


def garbage(size: int = 20) -> EncodedGroup:
    return EncodedGroup(b"\xff" * size, 1, None, Status.COMPLETED)


def test_an_undecodable_group_becomes_a_dead_letter_and_the_batch_is_still_full(
    open_stream, caplog
):
    stream = open_stream()
    stream.put(numbered(1))
    stream._producer.put(PutBatch([garbage(), garbage(5)]))
    stream.put_many([[numbered(2)], [numbered(3)]])
    with caplog.at_level(logging.ERROR, "redrb"):
        lease = stream.take(3, timeout=0)
    assert numbers(lease) == [1, 2, 3]
    assert caplog.text.count("cannot be decoded") == 2
    letters = stream.dead_letters()
    assert [letter.id for letter in letters] == [3, 2]
    assert all(letter.reason.startswith("cannot be decoded") for letter in letters)
    assert all(letter.items is None for letter in letters)
    lease.ack()


def test_when_undecodable_groups_leave_too_few_nothing_is_taken(open_stream):
    stream = open_stream()
    stream._producer.put(PutBatch([garbage()]))
    stream.put(numbered(1))
    with pytest.raises(BatchTimeout) as caught:
        stream.take(2, timeout=0)
    assert caught.value.available == 1
    assert stream.stats().ledger.leased == 0
    assert stream.stats().ledger.dead == 1


def test_entries_deleted_by_others_are_accounted_for(client, open_stream):
    stream = open_stream()
    stream.put_many([[numbered(n)] for n in range(5)])
    client.execute("XDEL", stream._task.store.keys.stream, "9999999999999-2")
    assert numbers(stream.take(4, timeout=0)) == [0, 2, 3, 4]
    with pytest.raises(BatchTimeout):
        stream.take(1, timeout=0, at_least=1)


def test_after_an_outage_longer_than_lease_ms_consumers_keep_their_leases(open_stream, client):
    """Deadlines pass while Redis is away: the first consumer back must not take others over."""
    first, second = open_stream(), open_stream()
    first.put_many([[numbered(n)] for n in range(4)])
    mine, theirs = first.take(2, timeout=0), second.take(2, timeout=0)
    consumers = first._task.store.keys.prefix + "consumers:default"
    for stream in (first, second):
        client.execute("ZADD", consumers, 1, stream._consumer.name)
    first._consumer.beat()
    second._consumer.beat()
    theirs.ack()
    mine.ack()
    assert first.stats().taken_over == 0
    assert first.stats().ledger.acked == 4


def test_grace_ends_a_lease_later(open_stream, client):
    dead, alive = open_stream(), open_stream(lease_ms=200)
    dead.put(numbered(1))
    dead.take(1, timeout=0)
    with pytest.raises(BatchTimeout):
        alive.take(1, timeout=0)
    dead._consumer._heartbeat.stop()
    consumers = dead._task.store.keys.prefix + "consumers:default"
    for stream in (dead, alive):
        client.execute("ZADD", consumers, 1, stream._consumer.name)
    assert numbers(alive.take(1, timeout=5)) == [1]
    assert alive.stats().taken_over == 1
