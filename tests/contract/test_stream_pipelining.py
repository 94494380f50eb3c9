"""writer() and leases(): the next put or take is on its way while the caller works."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from typing import Any

import pytest
import torch
from redis.exceptions import ConnectionError as Broken

from redrb import (
    BatchTimeout,
    ConfigError,
    ExperienceStream,
    LeaseLost,
    StoreFull,
    make_experience_batch,
)
from redrb.codec.encode import EncodedGroup
from redrb.connection import Client
from redrb.connection.client import Sent
from redrb.errors import RecordError
from redrb.experience import Status
from redrb.stream.put.batch import PutBatch
from redrb.stream.put.options import PutOptions
from redrb.stream.take.calls import Beat, Take, TakeRequest
from tests.audit import audit, kill_consumer
from tests.samples import numbered, numbers
from tests.scenes import until


@pytest.fixture
def stream(client, namespace):
    with ExperienceStream(client, "math", namespace=namespace) as stream:
        yield stream


def filled(stream: ExperienceStream, count: int) -> ExperienceStream:
    """Put numbered groups, on a server that knows all scripts: else a reply tells what is done."""
    stream.put(numbered(0))
    stream.take(1, timeout=0).ack()
    stream.put_many([[numbered(n)] for n in range(count)])
    return stream


def break_replies(
    monkeypatch: pytest.MonkeyPatch, owner: type, method: str, *, times: int
) -> list[int]:
    """Let the server do what is sent, and lose its replies so many times."""
    replies, left = getattr(owner, method), [times]

    def lost(*given: Any) -> Any:
        answers = replies(*given)
        if left[0]:
            left[0] -= 1
            raise Broken("Connection closed by server.")
        return answers

    monkeypatch.setattr(owner, method, lost)
    return left


def test_a_writer_puts_in_order_and_returns_ids_one_call_later(stream):
    with stream.writer() as writer:
        assert writer.put(numbered(0)) == ()
        assert writer.put([numbered(1), numbered(2)]) == (1,)
        assert writer.put(make_experience_batch([numbered(3), numbered(4)])) == (2,)
        assert writer.put([]) == (3, 4)
        assert writer.put(numbered(5), policy_version=7) == ()
        assert writer.put_many([[numbered(6)], [numbered(7), numbered(8)]]) == (5,)
        assert writer.flush() == (6, 7)
        assert writer.flush() == ()
    lease = stream.take(5, timeout=0)
    assert numbers(lease) == [0, 1, 2, 3, 4, 5]
    assert lease.policy_versions[-1] == 7


def test_leaving_waits_for_the_last_put(stream):
    with pytest.raises(ZeroDivisionError), stream.writer() as writer:
        writer.put(numbered(0))
        raise ZeroDivisionError
    assert stream.stats().ledger.put == 1


def test_many_groups_at_once_are_put_without_pipelining(stream):
    batch = make_experience_batch([numbered(n) for n in range(80)])
    with stream.writer() as writer:
        writer.put(numbered(99))
        assert len(writer.put(batch)) == 81
    assert stream.stats().stored == 81


def test_a_writer_whose_reply_was_lost_puts_once(stream, monkeypatch):
    left = break_replies(monkeypatch, Sent, "replies", times=1)
    with stream.writer() as writer:
        writer.put(numbered(0))
        assert writer.put(numbered(1)) == (1,)
    assert left == [0]
    assert numbers(stream.take(2, timeout=0)) == [0, 1]
    assert stream.stats().ledger.put == 2


@pytest.mark.parametrize("trouble", ["lost", "full"])
def test_tensors_may_be_changed_when_put_returns(stream, namespace, monkeypatch, trouble):
    client = stream._task.store.client
    if trouble == "lost":

        def broken(self):
            self.drop()
            monkeypatch.undo()
            raise Broken("Connection closed by server.")

        monkeypatch.setattr(Sent, "replies", broken)
    else:
        stream = ExperienceStream(client, "full", namespace=namespace, limit=1)
        stream.put(numbered(7))
    batch = make_experience_batch([numbered(1)])
    assert batch.values is not None
    with stream.writer() as writer:
        stream._producer._room.scarce = False
        writer.put(batch)
        batch.values.fill_(123.0)
        if trouble == "full":
            stream.take(1, timeout=0).ack()
    (item,) = stream.take(1, timeout=0).items()
    assert float(item.values) == 0.5


def test_a_put_that_found_no_room_stays_with_the_writer(client, namespace):
    stream = ExperienceStream(client, "math", namespace=namespace, limit=2, on_full="error")
    stream.put_many([[numbered(0)], [numbered(1)]])
    writer = stream.writer()
    stream._producer._room.scarce = False  # as when another producer has filled it
    writer.put(numbered(2))
    for _ in range(2):
        with pytest.raises(StoreFull):
            writer.put(numbered(9))
    stream.take(1, timeout=0).ack()
    assert writer.flush() == (3,) or stream.stats().ledger.put == 3
    assert numbers(stream.take(2, timeout=0)) == [1, 2]
    audit(stream)


def test_one_put_is_in_flight_until_it_is_finished_or_dropped(stream):
    in_flight = stream.writer().in_flight
    batch = in_flight.prepare([[numbered(0)]], PutOptions())
    in_flight.send(batch)
    with pytest.raises(ConfigError, match="still in flight"):
        in_flight.send(batch)
    assert in_flight.finish() == (1,)
    assert (in_flight.finish(), in_flight.drop()) == ((), 0)
    in_flight.send(batch)
    assert in_flight.drop() == 1


@pytest.mark.long
def test_a_put_on_a_crowded_task_whose_reply_was_lost_is_stored_once(
    client, namespace, monkeypatch
):
    stream = ExperienceStream(client, "math", namespace=namespace, limit=9)
    exchange = Client.exchange

    def lost(client, pipeline):
        exchange(client, pipeline)
        raise Broken("Connection closed by server.")

    with stream.writer() as writer:
        send = writer.in_flight.send

        def crowded(batch):
            stream._producer._room.scarce = True
            return send(batch)

        writer.put(numbered(0))
        assert writer.put(numbered(1)) == (1,)
        monkeypatch.setattr(writer.in_flight, "send", crowded)
        monkeypatch.setattr(Client, "exchange", lost)
        began = time.monotonic()
        assert writer.put(numbered(2), timeout=0.3) == (2,)
        assert time.monotonic() - began < 9  # the client's time is ten seconds
        monkeypatch.undo()
        assert writer.put(numbered(3)) == (3,)
    assert numbers(stream.take(4, timeout=0)) == [0, 1, 2, 3]
    assert stream.stats().ledger.put == 4
    audit(stream)


def test_ids_of_the_put_before_are_kept_when_this_one_finds_no_room(client, namespace):
    stream = ExperienceStream(client, "math", namespace=namespace, limit=2)
    with stream.writer() as writer:
        for n in range(2):
            writer.put(numbered(n))
        with pytest.raises(StoreFull):
            writer.put(numbered(2), timeout=0.05)
        assert writer.flush() == (2,)


def test_a_put_that_can_never_be_in_is_reported_once_and_given_up(client, namespace):
    stream = ExperienceStream(client, "math", namespace=namespace, max_bytes=2000)
    large = numbered(1, sequences=torch.randint(2**40, 2**41, (500,)))
    writer = stream.writer()
    writer.put(numbered(0))
    writer.put([large])
    with pytest.raises(ConfigError, match=r"put 2 of this writer.*larger than max_bytes") as caught:
        writer.put(numbered(2))  # not put: its caller cannot know which put the error is about
    assert caught.value.stored == 0
    assert writer.put(numbered(3)) == ()
    writer.put(make_experience_batch([numbered(4)]))
    writer.put([large])
    with pytest.raises(ConfigError, match="put 5"):
        writer.flush()
    assert writer.flush() == ()
    assert numbers(stream.take(3, timeout=0)) == [0, 3, 4]
    audit(stream)


def test_a_block_that_raised_does_not_wait_for_room(client, namespace, monkeypatch):
    monkeypatch.setattr("redrb.stream.put.writer.LEAVE_S", 0.1)
    stream = ExperienceStream(client, "math", namespace=namespace, limit=1)
    stream.put(numbered(0))
    started = time.monotonic()
    with pytest.raises(ZeroDivisionError) as caught, stream.writer() as writer:
        stream._producer._room.scarce = False
        writer.put(numbered(1))
        raise ZeroDivisionError
    assert time.monotonic() - started < 30
    assert any("is not stored" in note for note in caught.value.__notes__)
    assert stream.stats().producers_waiting == 0


def test_a_malformed_put_leaves_the_put_before_alone(stream):
    with stream.writer() as writer:
        writer.put(numbered(0))
        with pytest.raises(RecordError):
            writer.put(["no sample"])
        writer.put(numbered(1))
    assert numbers(stream.take(2, timeout=0)) == [0, 1]


def test_a_task_cleared_meanwhile_is_opened_again(stream):
    with stream.writer() as writer:
        writer.put(numbered(0))
        writer.flush()
        stream.clear()
        writer.put(numbered(1))
    assert numbers(stream.take(1, timeout=0)) == [1]


@pytest.mark.parametrize("prefetch", [0, 1, 5])
def test_leases_come_in_order_and_are_acknowledged_by_coming_back(stream, prefetch):
    filled(stream, 6)
    seen: list[list[int]] = []
    for lease in stream.leases(2, timeout=0.05, prefetch=prefetch):
        assert stream.stats().ledger.acked <= 2 * len(seen) + 1
        seen.append(numbers(lease))
        if len(seen) == 3:
            lease.ack()
            break
    assert seen == [[0, 1], [2, 3], [4, 5]]
    until(lambda: stream.stats().ledger.acked == 7)  # a thread has sent the second one
    ledger = stream.stats().ledger
    assert (ledger.acked, ledger.leased, ledger.waiting) == (7, 0, 0)
    assert stream.stats().samples_acked == 7
    audit(stream)


def test_a_take_that_was_interrupted_before_it_was_sent_leaves_its_slot(stream, monkeypatch):
    filled(stream, 4)
    loop = stream.leases(2, timeout=0)
    next(loop)
    slots = set(stream._consumer._leased)

    def interrupted(*given, **named):
        raise KeyboardInterrupt

    monkeypatch.setattr(Take, "with_payload", interrupted)
    with pytest.raises(KeyboardInterrupt):
        stream._taker.take(TakeRequest(1, 1))
    monkeypatch.undo()
    assert stream._consumer._leased.keys() == slots
    loop.close()


def test_the_next_batch_is_leased_while_this_one_is_trained_on(stream):
    filled(stream, 6)
    loop = stream.leases(2, timeout=0, prefetch=1)
    next(loop)
    until(lambda: stream.stats().ledger.leased == 4)
    next(loop)
    until(lambda: stream.stats().ledger.acked == 3)
    until(lambda: stream.stats().ledger.leased == 4)
    loop.close()
    until(lambda: stream.stats().ledger.leased == 0)
    ledger = stream.stats().ledger
    assert (ledger.leased, ledger.acked, ledger.waiting) == (0, 3, 4)
    assert numbers(stream.take(4, timeout=0)) == [2, 3, 4, 5]
    audit(stream)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_lease_may_be_ended_in_the_loop(stream, prefetch):
    filled(stream, 6)
    for number, lease in enumerate(stream.leases(2, timeout=0.05, prefetch=prefetch)):
        if number == 0:
            lease.reject("nan loss")
        elif number == 1:
            with lease:
                pass
        else:
            lease.release()
            break
    # the take ahead may have come behind that
    until(lambda: not [each for each in threading.enumerate() if "read-ahead" in each.name])
    until(lambda: stream.stats().ledger.leased == 0)
    until(lambda: stream.stats().ledger.acked == 3)
    ledger = stream.stats().ledger
    assert (ledger.acked, ledger.dead, ledger.leased, ledger.waiting) == (3, 2, 0, 2)
    audit(stream)


@pytest.mark.parametrize("prefetch", [0, 1, 5])
def test_the_end_of_data_is_a_timeout_and_everything_is_acknowledged(stream, prefetch):
    filled(stream, 5)
    sizes = []
    with pytest.raises(BatchTimeout):
        for lease in stream.leases(2, timeout=0.05, at_least=1, prefetch=prefetch):
            sizes.append(len(lease))
    assert sizes == [2, 2, 1]
    assert stream.stats().ledger.acked == 6
    audit(stream)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_take_whose_reply_was_lost_is_found_again(stream, monkeypatch, prefetch):
    filled(stream, 8)
    left = break_replies(monkeypatch, Client, "exchange", times=2)
    seen: list[int] = []
    for lease in stream.leases(2, timeout=1, prefetch=prefetch):
        seen += numbers(lease)
        if len(seen) == 8:
            lease.ack()
            break
    assert left == [0]
    assert seen == list(range(8))
    until(lambda: stream.stats().ledger.acked == 9)
    assert stream.stats().ledger.acked == 9
    audit(stream)


def test_groups_that_cannot_be_decoded_are_skipped(stream):
    filled(stream, 2)
    bad = EncodedGroup(b"\xff" * 9, 1, None, Status.COMPLETED)
    stream._producer.put(PutBatch([bad]))
    stream.put_many([[numbered(n)] for n in range(2, 7)])
    seen: list[int] = []
    for lease in stream.leases(2, timeout=0):
        seen += numbers(lease)
        if len(seen) == 6:
            lease.ack()
            break
    assert sorted(seen) == [0, 1, 2, 3, 4, 5]
    ledger = stream.stats().ledger
    assert (ledger.acked, ledger.dead, ledger.leased) == (7, 1, 0)
    audit(stream)


def test_a_lost_lease_is_an_error_one_batch_later(stream):
    filled(stream, 8)
    loop = stream.leases(2, timeout=1, prefetch=1)
    next(loop)
    next(loop)  # acknowledges the first
    until(lambda: stream.stats().ledger.acked == 3)
    until(lambda: loop._ahead.ready == 1)
    kill_consumer(stream)
    stream._task.store.call(Beat("default", "another", 1000, stream.incarnation), b"")
    next(loop)  # the take before the kill; it sends the acknowledgement of the second
    with pytest.raises(LeaseLost):
        next(loop)
    with pytest.raises(StopIteration):
        next(loop)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_closing_a_loop_whose_leases_are_lost_only_warns(stream, caplog, prefetch):
    filled(stream, 6)
    loop = stream.leases(2, timeout=1, prefetch=prefetch)
    next(loop)
    kill_consumer(stream)
    stream._task.store.call(Beat("default", "another", 1000, stream.incarnation), b"")
    with caplog.at_level(logging.WARNING, "redrb"):
        loop.close()
        stream._consumer.beat()
    assert stream.stats().ledger.waiting == 6


def test_a_batch_that_can_never_be_full_is_refused(client, namespace):
    stream = ExperienceStream(client, "math", namespace=namespace, limit=2)
    with pytest.raises(ConfigError, match="at_least"):
        stream.leases(2, at_least=3)
    with pytest.raises(ConfigError, match="never be full") as caught:
        next(stream.leases(3, timeout=0))
    said = str(caught.value)
    assert f" limit=2 was set by {socket.gethostname()}, process {os.getpid()}, at 20" in said
    assert said.endswith(f"change it: `redrb set math limit=none --namespace {namespace}`.")


@pytest.mark.parametrize(
    ("settings", "change"),
    [({"max_waiting": 2, "limit": 8}, "max_waiting=none"), ({"limit": 2}, "limit=none")],
)
def test_the_setting_that_keeps_a_batch_from_being_full_is_named(
    client, namespace, settings, change
):
    stream = ExperienceStream(client, "math", namespace=namespace, **settings)
    with pytest.raises(ConfigError, match=f"redrb set math {change}"):
        stream.take(3, timeout=0)
