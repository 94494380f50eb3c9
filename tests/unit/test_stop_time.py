"""The time that a process may spend on Redis after a signal."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from redrb import ConfigError
from redrb.connection.deadline import ending_within, left_s, most_s, within
from redrb.connection.stop_time import StopTime
from redrb.runtime.stopping import StopRequest, checked_stop_seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The time that a `StopTime` sees, which a test moves on."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    yield now
    monkeypatch.undo()


def test_only_time_on_redis_after_the_signal_counts(clock: list[float]) -> None:
    stop = StopTime(10.0)
    stop.enter()
    clock[0] += 50
    assert stop.left_s is None
    stop.begin()
    clock[0] += 4
    stop.begin()
    assert stop.left_s == 6.0
    stop.leave()
    clock[0] += 100  # a training step
    assert stop.left_s == 6.0
    stop.enter()
    clock[0] += 7
    assert stop.over
    stop.leave()
    assert stop.left_s == 0.0


def test_a_deadline_is_no_later_than_the_time_to_end() -> None:
    stop = StopTime(30.0)
    with ending_within(stop), ending_within(stop):
        assert left_s() is None
        assert most_s(7.0) == 7.0
        with within(60.0):
            assert 30 < (left_s() or 0) <= 60
            stop.begin()
            assert 1 < (left_s() or 0) <= 30
            with within(1.0):
                assert most_s(7.0) <= 1.0
    assert left_s() is None
    assert all(thread.name != "redrb-stop" for thread in threading.enumerate())


def test_what_is_under_way_is_interrupted_when_the_time_is_up() -> None:
    stop, interrupted = StopTime(0.2), threading.Event()
    with ending_within(stop), within(60.0):
        stop.interrupts.add(interrupted.set)
        stop.begin()
        began = time.monotonic()
        assert interrupted.wait(10)
        assert time.monotonic() - began >= 0.1
        assert stop.over


def test_other_threads_have_all_their_time() -> None:
    stop, seen = StopTime(0.0), list[float | None]()
    with ending_within(stop):
        stop.begin()
        thread = threading.Thread(target=lambda: seen.append(left_s()))
        thread.start()
        thread.join(10)
    assert seen == [None]


def test_a_postponed_request_shares_the_time_and_is_not_asked() -> None:
    request = StopRequest(3.0)
    never = request.postponed()
    request.ask("SIGTERM")
    request.time.begin()
    assert not never
    assert never.time.left_s == 3.0


@pytest.mark.parametrize("seconds", [-1, float("inf"), 1e12, "20", None])
def test_a_time_that_cannot_be_is_refused(seconds: object) -> None:
    with pytest.raises(ConfigError, match="stop_timeout="):
        checked_stop_seconds("stop_timeout", seconds)
