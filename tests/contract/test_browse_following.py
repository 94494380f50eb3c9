"""Arrivals are followed without taking them, and those that were not seen are counted."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

import redrb
from redrb.browse import Arrivals, Follower
from redrb.connection import Client
from redrb.errors import UnknownTask
from tests.samples import numbered
from tests.servers import Server, programs

Opener = Callable[..., redrb.ExperienceStream]


def until(follower: Follower, reached: Callable[[Arrivals], bool]) -> list[Arrivals]:
    """Return reports up to one that is `reached`; fails after 20 seconds."""
    found, end = [], time.monotonic() + 20
    while time.monotonic() < end:
        found.append(follower.next(0.5))
        if reached(found[-1]):
            return found
    raise AssertionError(found)


def test_groups_are_shown_as_they_arrive_and_are_still_there(
    open_stream: Opener, client: Client, namespace: str
) -> None:
    stream = open_stream()
    stream.put(numbered(0))
    stream.advance(7)
    with Follower(client, "math", namespace=namespace) as follower:
        stream.put([numbered(1), numbered(2, tags={"a": 1})], policy_version=5)
        stream.put(numbered(3))
        reports = until(follower, lambda seen: seen.shown == 2)
    first, second = (view for report in reports for view in report.groups)
    assert (first.id, first.state, first.reward) == (2, "arrived", 1.5)
    assert (first.oldest_version, first.staleness, first.samples_total) == (5, 2, 2)
    assert (second.id, second.reward, second.oldest_version) == (3, 3.0, None)
    assert (reports[-1].put, reports[-1].missed) == (2, 0)
    assert len(stream.take(3, timeout=0)) == 3


def test_groups_that_come_faster_than_they_are_read_are_counted(
    open_stream: Opener, client: Client, namespace: str
) -> None:
    stream = open_stream()
    with Follower(client, "math", namespace=namespace, per_s=5) as follower:
        stream.put_many([[numbered(number)] for number in range(300)])
        reports = until(follower, lambda seen: seen.missed > 0)
        last = reports[-1]
    assert last.put == 300
    assert last.shown < 100
    assert last.shown + last.missed <= 300


@pytest.mark.parametrize("url", [*list(programs())[:1]], indirect=True)
def test_groups_that_were_acknowledged_before_they_were_read_are_counted(
    open_stream: Opener, client: Client, namespace: str
) -> None:
    stream = open_stream()
    with Follower(client, "math", namespace=namespace, per_s=2) as follower:
        stream.put(numbered(0))
        until(follower, lambda seen: seen.shown == 1)
        for number in range(1, 4):
            stream.put(numbered(number))
            stream.take(1, timeout=0).ack()
        stream.take(1, timeout=0).ack()
        last = until(follower, lambda seen: seen.put == 4 and seen.missed == 3)[-1]
    assert last.shown == 1


@pytest.mark.parametrize("url", ["fake"], indirect=True)
def test_partitions_are_followed_together(client: Client, namespace: str) -> None:
    with redrb.ExperienceStream(client, "math", namespace=namespace, partitions=2) as stream:
        stream.put(numbered(0))
        with Follower(client, "math", namespace=namespace) as follower:
            made = [stream.put(numbered(number))[0] for number in range(4)]
            reports = until(follower, lambda seen: seen.shown == 4)
        assert sorted(view.id for report in reports for view in report.groups) == sorted(made)
        stream.clear()


def test_a_task_that_is_not_there_is_named(client: Client, namespace: str) -> None:
    with pytest.raises(UnknownTask, match="math"):
        Follower(client, "math", namespace=namespace)


@pytest.mark.parametrize("own_server", list(programs())[:1], indirect=True)
def test_it_goes_on_after_a_restart_without_data(
    own_server: Callable[..., Server], namespace: str
) -> None:
    server = own_server()
    with redrb.connect(server.url, retry_s=20) as client:
        options = {"namespace": namespace}
        with redrb.ExperienceStream(client, "math", **options) as stream:
            stream.put_many([[numbered(number)] for number in range(3)])
            with Follower(client, "math", namespace=namespace) as follower:
                stream.put(numbered(4))
                until(follower, lambda seen: seen.shown == 1)
                server.kill()
                away = until(follower, lambda seen: seen.away != "")[-1]
                assert "not reachable" in away.away
                server.start()
                stream.put(numbered(5))
                reports = until(follower, lambda seen: seen.shown == 2)
                assert any(report.anew for report in reports)
                assert (reports[-1].away, reports[-1].missed) == ("", 0)
                assert [view.reward for view in reports[-1].groups] == [5.0]
