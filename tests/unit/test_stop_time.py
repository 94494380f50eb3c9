"""The time that a process may spend on Redis after a signal."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from redrb import ConfigError
from redrb.connection.deadline import Deadline, here
from redrb.connection.stop import Stop, checked_stop_seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The time that a `Stop` sees, which a test moves on."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    yield now
    monkeypatch.undo()


def test_only_time_on_redis_after_the_signal_counts(clock: list[float]) -> None:
    stop = Stop(10.0)
    stop.enter()
    clock[0] += 50
    assert stop.left_s == math.inf
    stop.begin()
    clock[0] += 4
    stop.begin()
    assert stop.left_s == 6.0
    stop.leave()
    clock[0] += 100  # a training step
    assert stop.left_s == 6.0
    stop.enter()
    clock[0] += 7
    assert not stop.left_s
    stop.leave()
    assert stop.left_s == 0.0


def test_a_deadline_is_no_later_than_the_time_to_end() -> None:
    stop = Stop(30.0)
    with Deadline(budget=stop), Deadline(budget=stop):
        assert here().left_s == math.inf
        with Deadline(at_most=60.0):
            assert 30 < here().left_s <= 60
            stop.begin()
            assert 1 < here().left_s <= 30
            with Deadline(at_most=1.0):
                assert here().left_s <= 1.0
    assert here().left_s == math.inf
    assert all(thread.name != "redrb-stop" for thread in threading.enumerate())


def test_what_is_under_way_is_interrupted_when_the_time_is_up() -> None:
    stop, interrupted = Stop(0.2), threading.Event()
    with Deadline(budget=stop), Deadline(at_most=60.0):
        stop.interrupts.add(interrupted.set)
        stop.begin()
        began = time.monotonic()
        assert interrupted.wait(10)
        assert time.monotonic() - began >= 0.1
        assert not stop.left_s


def test_a_stop_wakes_all_that_wait_for_it() -> None:
    stop = Stop()
    with ThreadPoolExecutor(3) as threads:
        waits = [threads.submit(stop.wait, 60.0) for _ in range(3)]
        stop.ask()
        began = time.monotonic()
        assert all(wait.result() for wait in waits)
    assert time.monotonic() - began < 30.0


def test_other_threads_have_all_their_time() -> None:
    stop, seen = Stop(0.0), list[float]()
    with Deadline(budget=stop):
        stop.begin()
        thread = threading.Thread(target=lambda: seen.append(here().left_s))
        thread.start()
        thread.join(10)
    assert seen == [math.inf]


@pytest.mark.parametrize("seconds", [-1, float("inf"), 1e12, "20", None])
def test_a_time_that_cannot_be_is_refused(seconds: object) -> None:
    with pytest.raises(ConfigError, match="stop_timeout="):
        checked_stop_seconds("stop_timeout", seconds)
