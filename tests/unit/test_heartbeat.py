"""A heartbeat goes on, whatever happens to a beat."""

from __future__ import annotations

import ctypes
import logging
import queue
import threading
import time

from redrb.errors import StoreUnavailable
from redrb.stream.heartbeat import Heartbeat, Silences


class Beating:
    """Fails at its first beat."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.beats = 0
        self.went_on = threading.Event()

    def beat(self) -> None:
        self.beats += 1
        if self.beats == 1:
            raise self.error
        self.went_on.set()


def test_a_beat_that_fails_for_any_reason_does_not_end_the_next_ones(caplog):
    beating = Beating(ValueError("an odd reply"))
    with caplog.at_level(logging.WARNING, "redrb"):
        heartbeat = Heartbeat(beating.beat, 30, "test")
        assert beating.went_on.wait(10)
        heartbeat.stop()
    assert "an odd reply" in caplog.text
    assert "a heartbeat failed" in caplog.text


class Failing:
    """Fails while Redis is away."""

    def __init__(self, server: AwayServer) -> None:
        self.server = server
        self.beats = 0

    def beat(self) -> None:
        self.beats += 1
        self.server.beat()


class AwayServer:
    """A server that is away until it is told otherwise, and counts the beats that it has seen."""

    def __init__(self) -> None:
        self.away = True
        self.beats: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def beat(self) -> None:
        self.beats.put(self.away)
        if self.away:
            raise StoreUnavailable("refused", where="there")

    def until(self, beats: int, *, away: bool) -> None:
        """Wait for beats while it is away, or not."""
        while beats:
            beats -= self.beats.get(timeout=20) is away


def test_heartbeats_of_a_server_that_is_away_are_logged_once(caplog):
    server = AwayServer()
    beating = [Failing(server) for _ in range(4)]
    heartbeats = [Heartbeat(each.beat, 30, "test") for each in beating]
    server.until(40, away=True)
    failed = [record.getMessage() for record in caplog.records]
    assert failed == ["a heartbeat failed; leases last for lease_ms after the one before: refused"]
    server.away = False
    server.until(40, away=False)
    for heartbeat in heartbeats:
        heartbeat.stop()
    [_, over] = [record.getMessage() for record in caplog.records]
    assert over.startswith("recovered after ")
    assert over.endswith(": a heartbeat failed; leases last for lease_ms after the one before")


class Listening:
    """Beats that Redis answers at once."""

    def __init__(self) -> None:
        self.silences = Silences()
        self.heard = threading.Event()

    def beat(self) -> None:
        self.silences.end()
        self.heard.set()


def test_a_call_that_holds_the_lock_of_python_is_a_silence_of_its_length() -> None:
    listening = Listening()
    heartbeat = Heartbeat(listening.beat, 30, "test")
    assert listening.heard.wait(10)
    began = time.monotonic()
    ctypes.PyDLL(None).usleep(250_000)  # as a C extension that does not give the lock up
    assert listening.silences.longest_s(began) > 0.24
    listening.heard.clear()
    assert listening.heard.wait(10)
    heartbeat.stop()
    assert listening.silences.longest_s(began) > 0.24
    after = time.monotonic()
    assert listening.silences.longest_s(after) < 0.24


def test_the_longest_silence_since_a_time_is_found_among_many(monkeypatch) -> None:
    now = 0.0
    monkeypatch.setattr("redrb.stream.heartbeat.time.monotonic", lambda: now)
    silences, gaps = Silences(), []
    for number in range(1000):
        begin, now = now, now + (number * 37 % 101) + 1
        silences.end()
        gaps.append((begin, now))
        for since in (0.0, now / 2, begin, now):
            recent = [end - max(begin, since) for begin, end in gaps if end > since]
            assert silences.longest_s(since) == max(recent, default=0.0)
