"""A failure that lasts is logged once, then at growing intervals, then that it is over."""

from __future__ import annotations

import gc
import itertools
import logging
from types import SimpleNamespace

import pytest

from redrb.connection import outage
from redrb.connection.outage import Outage, shared_outage


class Clock:
    """The time of outages, in seconds."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


class Member:
    """An object that may fail."""


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(outage, "time", SimpleNamespace(monotonic=clock.monotonic))
    return clock


def test_an_outage_is_logged_at_growing_intervals(clock, caplog):
    away, logged = Outage("Redis is away"), []
    for second in range(8 * 3600):
        clock.now = 100.0 + second
        for _ in range(3):
            away.failed("refused")
        logged += [second] * len(caplog.records)
        caplog.clear()
    gaps = [later - earlier for earlier, later in itertools.pairwise(logged)]
    assert logged[0] == 0
    assert gaps[:7] == [30, 60, 120, 240, 480, 960, 1920]
    assert set(gaps[7:]) == {3600}
    away.over()
    away.over()
    assert [record.getMessage() for record in caplog.records] == [
        "recovered after 28799.0 s: Redis is away"
    ]
    away.failed("refused")
    assert caplog.records[-1].getMessage() == "Redis is away: refused"


def test_a_shared_outage_is_over_when_all_have_succeeded_or_are_gone(clock, caplog):
    members = [Member() for _ in range(3)]
    for member in members:
        shared_outage("heartbeats fail", "a").failed("refused", who=member)
    assert shared_outage("heartbeats fail", "b") is not shared_outage("heartbeats fail", "a")
    for member in members[:2]:
        shared_outage("heartbeats fail", "a").over(who=member)
    shared_outage("heartbeats fail", "a").over(who=Member())  # it has never failed
    assert [record.getMessage() for record in caplog.records] == ["heartbeats fail: refused"]
    del member
    shared_outage("heartbeats fail", "a").failed("refused", who=members[0])
    members.pop()
    gc.collect()
    shared_outage("heartbeats fail", "a").over(who=members[0])
    assert caplog.records[-1].getMessage().startswith("recovered after 0.0 s")
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
