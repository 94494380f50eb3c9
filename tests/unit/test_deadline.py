"""How long a block of a thread waits and uses Redis."""

import math
import time

import pytest

from redrb import ConfigError
from redrb.connection.deadline import (
    GRACE_S,
    LAST_REQUESTS_S,
    PAGES_S,
    SHORT_OUTAGE_S,
    Deadline,
    here,
)
from redrb.connection.stop import Stop


@pytest.fixture
def clock(monkeypatch):
    """The time that deadlines see, which a test moves on."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    yield now
    monkeypatch.undo()


def test_a_timeout_ends_waits_then_repetitions_then_all_work(clock):
    with Deadline(5.0) as deadline:
        assert here() is deadline
        assert (deadline.repeats_s, deadline.left_s) == (5.0, 5.0 + GRACE_S)
        clock[0] += 5.0
        assert deadline.over
        assert not deadline.pages_over
        assert deadline.repeats_s == SHORT_OUTAGE_S
        clock[0] += PAGES_S
        assert deadline.pages_over
        clock[0] += GRACE_S
        assert deadline.passed
    assert not here().over


@pytest.mark.parametrize("seconds", [0.001, 1.0, 4.0, 5.0, 10.0, 17.0])
def test_a_connection_lasts_as_long_as_the_server_was_asked_to_wait(seconds):
    with Deadline(seconds, blocks_s=seconds):
        assert seconds < here().shortened(20.0) <= 20.0
    with Deadline(60, at_most=2.0), Deadline(seconds, blocks_s=seconds):
        assert here().shortened(20.0) <= 2.0


@pytest.mark.parametrize("inner", [None, 60.0])
def test_a_block_within_another_one_ends_no_later(clock, inner):
    with Deadline(5.0) as outer:
        clock[0] += 1.0
        with Deadline(inner) as deadline:
            assert (deadline.waits_s, deadline.left_s) == (4.0, outer.left_s)
            clock[0] += 4.0
            assert deadline.over
            assert deadline.waited_s == 4.0
    assert here().left_s == math.inf


def test_waits_end_before_work_with_redis_must_have_ended(clock):
    with Deadline(at_most=1.0), Deadline(60.0) as deadline:
        assert deadline.slice_s(60.0) == pytest.approx(1.0 - LAST_REQUESTS_S)
        clock[0] += 1.0 - LAST_REQUESTS_S / 2
        assert deadline.over
        assert not deadline.passed


def test_several_entries_of_a_block_share_its_time_for_repetitions(clock):
    short = Deadline(repeat_s=1.0)
    with Deadline(60.0):
        for left_s in (1.0, 0.25, 0.0):
            with short:
                assert here().repeats_s == left_s
            assert here().repeats_s > 50.0
            clock[0] += 0.75


def test_a_stop_ends_the_waits_of_blocks_within_its_block_and_no_others():
    stop = Stop()
    with Deadline(stop=stop):
        with Deadline(60.0) as deadline:
            assert not deadline.over
            stop.ask()
            assert deadline.over
            assert deadline.pages_over
            assert not deadline.passed
            began = time.monotonic()
            deadline.pause(60.0)
            assert time.monotonic() - began < 30.0
        with Deadline(60.0, stop=Stop()) as other:
            assert not other.over
    assert not here().over


@pytest.mark.parametrize("timeout", [-1, "5", True, math.nan])
def test_a_timeout_that_cannot_be_is_refused(timeout):
    with pytest.raises(ConfigError, match="timeout="):
        Deadline(timeout)
