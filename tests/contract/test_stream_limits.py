"""A put into a full task waits, drops old groups or raises."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from redrb import ConfigError, ExperienceStream, StoreFull
from redrb.errors import OutcomeUnknown
from redrb.stream.put.calls import PutReply
from redrb.stream.put.options import SourcesRefused
from redrb.stream.put.producer import PartsEnded, Producer
from tests.audit import audit
from tests.samples import numbered, numbers
from tests.scenes import until


def size_of_a_group(stream: ExperienceStream) -> int:
    stream.put(numbered(0))
    stream.take(1, timeout=0).ack()
    return stream.stats().bytes_put


def test_a_full_task_refuses_and_says_how_many_groups_are_in(open_stream):
    stream = open_stream(limit=40, on_full="error")
    with pytest.raises(StoreFull) as caught:
        stream.put_many([[numbered(n)] for n in range(50)])
    assert (caught.value.stored, caught.value.task, caught.value.reason) == (32, "math", "limit")
    assert stream.stats().stored == 32


def test_max_waiting_counts_the_waiting_groups_of_the_slowest_consumer_group(open_stream):
    stream = open_stream(max_waiting=4, on_full="error")
    assert len(stream.put_many([[numbered(n)] for n in range(4)])) == 4
    with pytest.raises(StoreFull, match="max_waiting allows") as caught:  # nobody has joined
        stream.put(numbered(9))
    assert (caught.value.stored, caught.value.reason) == (0, "max_waiting")
    other = open_stream(group="other")
    other.join_group()
    for _ in range(2):
        stream.take(2, timeout=0)
        with pytest.raises(StoreFull):
            stream.put(numbered(9))
    held = other.take(3, timeout=0)
    stream.put_many([[numbered(n)] for n in range(4, 7)])
    held.release()  # they wait again: one more than allowed for each that was put meanwhile
    assert (len(other), len(stream)) == (7, 3)
    with pytest.raises(StoreFull):
        stream.put(numbered(9))
    other.take(4, timeout=0).ack()
    stream.put(numbered(7))
    assert numbers(other.take(4, timeout=0)) == [4, 5, 6, 7]
    with pytest.raises(ConfigError, match="at most 4 groups"):
        other.take(5, timeout=10)


def test_a_put_of_more_than_the_limit_goes_in_by_and_by(open_stream):
    stream = open_stream(limit=5)
    with ThreadPoolExecutor(1) as pool:
        put = pool.submit(stream.put_many, [[numbered(n)] for n in range(13)])
        taken: list[int] = []
        while len(taken) < 13:
            with stream.take(5, timeout=0.3, at_least=1) as lease:
                assert stream.stats().stored <= 5
                taken += numbers(lease)
        assert len(put.result()) == 13
    assert taken == list(range(13))


@pytest.mark.parametrize("timeout", [0, 0.2])
def test_a_blocked_put_gives_up_in_time(open_stream, timeout):
    stream = open_stream(limit=2)
    stream.put_many([[numbered(1)], [numbered(2)]])
    for _ in range(2):
        started = time.monotonic()
        with pytest.raises(StoreFull, match="is full") as caught:
            stream.put(numbered(3), timeout=timeout)
        assert timeout <= time.monotonic() - started < timeout + 30
        assert caught.value.reason == "limit"
    assert stream.stats().producers_waiting == 0
    stream.take(1, timeout=0).ack()
    stream.put(numbered(3), timeout=timeout)


@pytest.mark.parametrize(
    ("outcome", "error"),
    [
        ("ended", PartsEnded),
        ("known", SourcesRefused),
        ("past", SourcesRefused),
        ("never", ConfigError),
        ("forgotten", OutcomeUnknown),
    ],
)
def test_a_put_that_ends_without_the_room_it_waited_for_gives_it_to_others(
    open_stream, monkeypatch, outcome, error
):
    """Whatever the script answers after the wait: nobody else waits for room that nobody uses."""
    stream, other = open_stream(limit=1), open_stream(limit=1)
    stream.put(numbered(1))

    def reply(producer, pending, request):
        pending.repeated = True
        return PutReply(outcome)

    with ThreadPoolExecutor(1) as pool:
        put = pool.submit(stream.put, numbered(2), timeout=30)
        until(lambda: other.stats().producers_waiting == 1)
        monkeypatch.setattr(Producer, "_reply", reply)
        other.take(1, timeout=0).ack()
        with pytest.raises(error):
            put.result(timeout=30)
    monkeypatch.undo()
    assert other.stats().producers_waiting == 0
    other.put(numbered(3), timeout=0)


def test_parts_that_another_caller_puts_meanwhile_keep_no_room(open_stream):
    stream, callers = open_stream(limit=2), [open_stream(limit=2) for _ in range(2)]
    stream.put_many([[numbered(1)], [numbered(2)]])
    with ThreadPoolExecutor(2) as pool:
        puts = [
            pool.submit(each.put_part, "prompt", numbered(3), index=0, of=1) for each in callers
        ]
        until(lambda: stream.stats().producers_waiting == 2)
        stream.take(2, timeout=0).ack()
        for put in puts:
            put.result(timeout=30)
    assert stream.stats().producers_waiting == 0
    assert numbers(stream.take(1, timeout=0)) == [3]


def test_max_bytes_counts_what_is_stored(open_stream):
    stream = open_stream(max_bytes=20_000, on_full="error")
    size = size_of_a_group(stream)
    many = 20_000 // size + 1
    with pytest.raises(StoreFull) as caught:
        stream.put_many([[numbered(n)] for n in range(many)])
    assert caught.value.reason == "max_bytes"
    assert stream.stats().stored == caught.value.stored <= many - 1


def test_a_put_blocked_by_bytes_waits_and_gives_up_in_time(open_stream):
    stream = open_stream(max_bytes=1000)
    size = size_of_a_group(stream)
    fit = 1000 // size
    assert 1000 % size, "the case is a rest that is too small for a group"
    with pytest.raises(StoreFull) as caught:
        stream.put_many([[numbered(n)] for n in range(fit + 1)], timeout=0.2)
    assert (caught.value.stored, caught.value.reason) == (fit, "max_bytes")
    with ThreadPoolExecutor(1) as pool:
        put = pool.submit(stream.put, numbered(fit), timeout=10)
        while stream.stats().producers_waiting == 0:
            time.sleep(0.005)
        stream.take(1, timeout=0).ack()
        assert put.result(timeout=30)
    assert numbers(stream.take(fit, timeout=0)) == list(range(1, fit + 1))


def test_bytes_are_dropped_from_the_oldest_on(open_stream):
    stream = open_stream(max_bytes=2000, on_full="drop_oldest")
    fit = 2000 // size_of_a_group(stream)
    for n in range(fit + 3):
        stream.put(numbered(n))
    assert numbers(stream.take(fit, timeout=0)) == list(range(3, fit + 3))


def test_sixteen_producers_never_overshoot_the_limit(open_stream):
    limit, each = 8, 6
    streams = [open_stream(limit=limit) for _ in range(4)]
    done = threading.Event()
    seen: list[int] = []

    def watch():
        while not done.is_set():
            seen.append(streams[0].stats().stored)

    def put(producer):
        for n in range(each):
            streams[producer % 4].put(numbered(producer * each + n), timeout=30)

    with ThreadPoolExecutor(17) as pool:
        watcher = pool.submit(watch)
        puts = [pool.submit(put, producer) for producer in range(16)]
        taken: list[int] = []
        while len(taken) < 16 * each:
            with streams[0].take(4, timeout=30) as lease:
                taken += numbers(lease)
        for future in puts:
            future.result()
        done.set()
        watcher.result()
    assert max(seen) <= limit
    assert sorted(taken) == list(range(16 * each))
    for producer in range(16):
        own = [n for n in taken if n // each == producer]
        assert own == sorted(own), "puts of one producer arrive in order"


def test_groups_that_another_consumer_group_leases_are_evicted_after_their_release(open_stream):
    stream = open_stream(limit=7, on_full="drop_oldest")
    critic = open_stream(group="critic")
    critic.join_group()
    stream.join_group()
    ids = stream.put_many([[numbered(n)] for n in range(4)])
    held = critic.take(3, timeout=0)
    stream.put_many([[numbered(n)] for n in range(4, 8)])
    assert [group is None for group in stream.read(ids)] == [False, False, False, True]
    held.ack(held.ids[:1])
    held.reject("bad", held.ids[:1])
    audit(stream)
    stream.put_many([[numbered(n)] for n in range(8, 10)])
    assert [group is None for group in stream.read(ids)] == [True, True, False, True]
    critic.drop_group()
    stream.put(numbered(10))
    assert stream.read(ids) == [None] * 4
    audit(stream)
