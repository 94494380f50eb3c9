"""ExperienceSender: makers go on while their experience is put, once."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from redis.exceptions import ConnectionError as Broken

import redrb
from redrb import (
    ConfigError,
    Experience,
    ExperienceStream,
    StoreUnavailable,
    make_experience_batch,
)
from redrb.connection.client import Sent
from redrb.errors import RecordError, SendFailed
from redrb.stream.sending import ExperienceSender
from tests import warm
from tests.audit import audit
from tests.conftest import REAL
from tests.samples import numbered, numbers
from tests.scenes import holds_in_a_child, until

pytestmark = pytest.mark.long  # the same requests as test_stream*.py

ROOT = Path(__file__).parents[2]


@pytest.fixture
def stream(client, namespace):
    with ExperienceStream(client, "math", namespace=namespace) as stream:
        yield stream


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    until(lambda: not threads())


def threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name.startswith("redrb-sender")]


def batch(*row_numbers: int) -> Experience:
    return make_experience_batch([numbered(n) for n in row_numbers])


def waiting(stream: ExperienceStream) -> list[int]:
    """Return the numbers of the waiting groups, in order."""
    count = len(stream)
    lease = stream.take(count, timeout=0) if count else None
    if lease is None:
        return []
    found = numbers(lease)
    lease.release()
    return found


def test_sent_groups_arrive_in_order(stream):
    with ExperienceSender(stream) as sender:
        sender.send(numbered(0), policy_version=7)
        sender.send([numbered(1), numbered(2)])
        sender.send(batch(3, 4))
        sender.send([])
        sender.flush(timeout=10)
        assert (sender.waiting_groups, sender._behind.nbytes) == (0, 0)
        sender.send(numbered(5))
    assert waiting(stream) == [0, 1, 2, 3, 4, 5]
    assert stream.take(1, timeout=0).policy_versions == [7]
    assert stream.stats().ledger.put == 5
    audit(stream)


def test_groups_are_dealt_out_in_turn_across_calls(client, namespace):
    streams = [ExperienceStream(client, name, namespace=namespace) for name in ("a", "b", "c")]
    with ExperienceSender(streams) as sender:
        sender.send(batch(0, 1, 2, 3), policy_version=3)
        sender.send(batch(4, 5))
        sender.send([numbered(6), numbered(6)])
        sender.send(numbered(7))
        sender.send(batch(8))
    assert [waiting(stream) for stream in streams] == [[0, 3, 6, 6], [1, 4, 7], [2, 5, 8]]
    for stream in streams:
        stream.close()


def test_rows_keep_their_metadata_when_they_are_dealt_out(client, namespace):
    streams = [ExperienceStream(client, name, namespace=namespace) for name in ("a", "b")]
    items = [numbered(n, policy_version=n, tags={"n": n}, group_id=f"g{n}") for n in range(5)]
    with ExperienceSender(streams) as sender:
        sender.send(make_experience_batch(items))
    (odd,) = (streams[1].take(2, timeout=0),)
    assert [item.group_id for item in odd.items()] == ["g1", "g3"]
    assert odd.policy_versions == [1, 3]
    for stream in streams:
        stream.close()


@pytest.mark.parametrize("kind", ["experience", "group"])
def test_tensors_may_be_changed_when_send_returns(client, namespace, kind):
    stream = ExperienceStream(client, "math", namespace=namespace, limit=1)
    stream.put(numbered(0))
    given: Any = batch(1) if kind == "experience" else [numbered(1)]
    record = given if kind == "experience" else given[0]
    with ExperienceSender(stream) as sender:
        sender.send(given)
        record.values.fill_(99.0)
        record.tags = {"changed": True}
        stream.take(1, timeout=0).ack()
    (item,) = stream.take(1, timeout=0).items()
    assert float(item.values) == 0.5
    assert item.tags == {}
    stream.close()


def test_send_waits_at_the_bound_and_says_how_long(client, namespace):
    stream = ExperienceStream(client, "math", namespace=namespace, limit=2)
    with ExperienceSender(stream, max_groups=3) as sender:
        began = time.monotonic()
        for n in range(5):
            sender.send(numbered(n))
            until(lambda: sender.waiting_groups <= 3)
        free_s = sender.backpressure_s
        assert free_s <= time.monotonic() - began
        with pytest.raises(SendFailed, match="no room for more") as caught:
            sender.send(numbered(5), timeout=0.2)
        assert caught.value.unsent == 3
        assert 0.15 < sender.backpressure_s - free_s <= time.monotonic() - began
        stream.take(2, timeout=5).ack()
        sender.send(numbered(5), timeout=10)
        stream.take(2, timeout=5).ack()
        stream.take(2, timeout=5).release()
    assert waiting(stream) == [4, 5]
    assert stream.stats().ledger.put == 6
    stream.close()


def test_memory_is_bounded_by_bytes(client, namespace):
    def image(number):
        return numbered(number, tensors={"image": torch.zeros(20_000)})

    stream = ExperienceStream(client, "math", namespace=namespace, limit=1)
    stream.put(image(0))
    most = 1 << 20
    sender = ExperienceSender(stream, max_bytes=most, timeout=0.05)
    refused = 0
    for n in range(40):
        try:
            sender.send(image(n))
        except SendFailed:
            refused += 1
            if refused == 3:
                break
    assert refused == 3
    assert most * 0.8 < sender._behind.nbytes <= most
    with pytest.raises(SendFailed) as caught:
        sender.close(timeout=0.1)
    assert caught.value.unsent == 13
    assert stream.stats().ledger.put == 1
    stream.close()


def test_one_send_beyond_the_bound_goes_alone(stream):
    with ExperienceSender(stream, max_groups=2) as sender:
        sender.send(batch(*range(5)))
        sender.send(batch(*range(5, 10)), timeout=10)
    assert waiting(stream) == list(range(10))


def test_a_group_that_cannot_be_put_is_reported_once_and_others_go_on(client, namespace):
    stream = ExperienceStream(client, "math", namespace=namespace, max_bytes=20_000)
    big = numbered(1, sequences=torch.arange(20_000))
    with ExperienceSender(stream) as sender:
        sender.send(numbered(0))
        sender.send(big)
        sender.send(numbered(2))
        with pytest.raises(SendFailed, match="larger than max_bytes") as caught:
            sender.flush(timeout=10)
        assert (caught.value.dropped, caught.value.unsent) == (1, 0)
        assert isinstance(caught.value.__cause__, ConfigError)
        sender.flush()
        sender.send(numbered(3, reward=torch.tensor(float("nan"))))
        until(lambda: sender.waiting_groups == 0)
        with pytest.raises(SendFailed) as caught:
            sender.send(numbered(4))
        assert caught.value.dropped == 1
        sender.send(numbered(4))
    assert waiting(stream) == [0, 2, 4]
    stream.close()


def test_malformed_arguments_are_refused_at_once(stream):
    with ExperienceSender(stream) as sender:
        for wrong in (7, [7], "text", Experience(None, None, None, None, None, None)):
            with pytest.raises(RecordError):
                sender.send(wrong)
        with pytest.raises(ConfigError):
            sender.send(numbered(0), priority=float("nan"))
        assert sender.waiting_groups == 0
    with pytest.raises(ConfigError, match="closed"):
        sender.send(numbered(0))
    for wrong in ([], ["math"]):
        with pytest.raises(ConfigError, match="at least one"):
            ExperienceSender(wrong)


def test_lost_replies_store_nothing_twice(stream, monkeypatch):
    replies, calls = Sent.replies, [0]

    def lost(sent):
        answers = replies(sent)
        calls[0] += 1
        if calls[0] % 2:
            raise Broken("Connection closed by server.")
        return answers

    monkeypatch.setattr(Sent, "replies", lost)
    with ExperienceSender(stream) as sender:
        for n in range(20):
            sender.send(numbered(n))
    assert calls[0] > 5
    assert waiting(stream) == list(range(20))
    audit(stream)


def test_it_waits_as_long_as_redis_is_away(stream, monkeypatch):
    finish, away = stream._producer.finish, threading.Event()

    def sometimes(*arguments):
        if away.is_set():
            raise StoreUnavailable("gone", where="here")
        return finish(*arguments)

    monkeypatch.setattr(stream._producer, "finish", sometimes)
    away.set()
    with ExperienceSender(stream) as sender:
        for n in range(10):
            sender.send(numbered(n))
        with pytest.raises(SendFailed, match="gone") as caught:
            sender.flush(timeout=0.1)
        assert caught.value.unsent == 10
        away.clear()
        sender.flush(timeout=10)
    assert waiting(stream) == list(range(10))


def test_close_is_bounded_and_says_what_is_lost(client, namespace):
    stream = ExperienceStream(client, "math", namespace=namespace, limit=2)
    sender = ExperienceSender(stream)
    for n in range(6):
        sender.send(numbered(n))
    while len(stream) < 2:
        time.sleep(0.01)
    began = time.monotonic()
    with pytest.raises(SendFailed, match="given up") as caught:
        sender.close(timeout=0.1)
    assert time.monotonic() - began < 30
    assert caught.value.unsent == 4
    assert not threads()
    sender.close()
    assert waiting(stream) == [0, 1]
    audit(stream)
    stream.close()


def test_an_exception_in_the_block_is_not_hidden(client, namespace):
    stream = ExperienceStream(client, "math", namespace=namespace, limit=1)
    with (
        pytest.raises(ZeroDivisionError) as caught,
        ExperienceSender(stream, timeout=0.1) as sender,
    ):
        sender.send(batch(0, 1))
        raise ZeroDivisionError
    assert "given up" in caught.value.__notes__[0]
    stream.close()


def test_a_sender_that_is_garbage_sends_all_the_same(stream):
    sender = ExperienceSender(stream)
    for n in range(10):
        sender.send(numbered(n))
    del sender
    gc.collect()
    until(lambda: not threads())
    assert waiting(stream) == list(range(10))


def test_many_threads_may_send(stream):
    with ExperienceSender(stream, max_groups=8) as sender:

        def send(first):
            for n in range(first, first + 25):
                sender.send(numbered(n))

        makers = [threading.Thread(target=send, args=(first,)) for first in (0, 25, 50, 75)]
        for maker in makers:
            maker.start()
        for maker in makers:
            maker.join()
    found = waiting(stream)
    assert sorted(found) == list(range(100))
    assert [n for n in found if n < 25] == list(range(25))


def test_a_fork_has_no_part_in_a_sender(stream):
    with ExperienceSender(stream) as sender:
        sender.send(numbered(0))

        def refuses():
            with pytest.raises(ConfigError):
                sender.send(numbered(1))
            return sender.close() is None

        assert holds_in_a_child(refuses)
        sender.send(numbered(2))
    assert waiting(stream) == [0, 2]


MAKES = """
import signal, sys, threading, redrb
from redrb.errors import SendFailed
from redrb.stream.sending import ExperienceSender
from tests.samples import numbered
client = redrb.connect(sys.argv[1])
limit = int(sys.argv[3])
stream = redrb.ExperienceStream(client, "math", namespace=sys.argv[2], limit=limit or None)
sender = ExperienceSender(stream, max_groups=50)

def end(*_):
    try:
        sender.close(timeout=1)
    except SendFailed as failure:
        print("unsent", failure.unsent, flush=True)
    sys.exit(3)

signal.signal(signal.SIGTERM, end)
for n in range(100):
    sender.send(numbered(n))
    if n == 10:
        print("ready", flush=True)
"""


def test_a_process_that_ends_sends_what_it_holds(server_urls, namespace):
    url = server_urls(next(iter(REAL)))
    command = [sys.executable, "-W", "error", "-c", MAKES, url, namespace, "0"]
    warm.run(command, check=True, timeout=60, cwd=ROOT)
    with redrb.connect(url) as client:
        assert waiting(ExperienceStream(client, "math", namespace=namespace)) == list(range(100))


def test_sigterm_at_the_bound_ends_in_time(server_urls, namespace):
    url = server_urls(next(iter(REAL)))
    command = [sys.executable, "-W", "error", "-c", MAKES, url, namespace, "5"]
    with warm.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout.readline() == "ready\n"
        time.sleep(0.3)  # the sender is at its bound
        maker.send_signal(signal.SIGTERM)
        began = time.monotonic()
        assert maker.wait(30) == 3
        assert time.monotonic() - began < 20
        assert maker.stdout.read() == "unsent 50\n"
