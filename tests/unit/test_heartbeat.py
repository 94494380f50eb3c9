"""A heartbeat goes on, whatever happens to a beat."""

from __future__ import annotations

import logging
import threading

import pytest

from redrb.stream.heartbeat import Heartbeat


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


def test_a_beat_that_fails_for_any_reason_does_not_end_the_next_ones(
    caplog: pytest.LogCaptureFixture,
) -> None:
    beating = Beating(ValueError("an odd reply"))
    with caplog.at_level(logging.WARNING, "redrb"):
        heartbeat = Heartbeat(beating.beat, 30, "test")
        assert beating.went_on.wait(10)
        heartbeat.stop()
    assert "an odd reply" in caplog.text
    assert "leases may be taken over" in caplog.text
