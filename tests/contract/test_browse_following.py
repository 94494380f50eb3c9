"""Arrivals are followed without taking them, and those that were not seen are counted."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

import redrb
from redrb.browse import Follower, Page
from redrb.connection import Client
from redrb.errors import StoreUnavailable, UnknownTask
from tests.samples import numbered
from tests.servers import Server, programs

Opener = Callable[..., redrb.ExperienceStream]


def until(follower: Follower, reached: Callable[[Page], bool], **options: bool) -> list[Page]:
    """Return pages up to one that is `reached`; fails after 20 seconds."""
    found, end = [], time.monotonic() + 20
    while time.monotonic() < end:
        found.append(follower.next(0.5, **options))
        if reached(found[-1]):
            return found
    raise AssertionError(found)


def test_groups_are_shown_as_they_arrive_and_are_still_there(
    open_stream: Opener, client: Client, namespace: str
) -> None:
    stream = open_stream()
    stream.put(numbered(0))
    stream.advance(7)
    follower = Follower(client, "math", namespace=namespace)
    stream.put([numbered(1), numbered(2, tags={"a": 1})], policy_version=5)
    stream.put(numbered(3))
    pages = until(follower, lambda page: any(view.id == 3 for view in page.groups), full=True)
    first, second = (view for page in pages for view in page.groups)
    assert (first.id, first.state, first.reward, len(first.samples)) == (2, "waiting", 1.5, 2)
    assert (first.oldest_version, first.staleness, first.samples_total) == (5, 2, 2)
    assert (second.id, second.reward, second.oldest_version) == (3, 3.0, None)
    assert not any(page.notes for page in pages)
    assert len(stream.take(3, timeout=0)) == 3


def test_groups_that_are_skipped_or_gone_are_counted(
    open_stream: Opener, client: Client, namespace: str
) -> None:
    stream = open_stream()
    follower = Follower(client, "math", namespace=namespace)
    stream.put_many([[numbered(number)] for number in range(300)])
    (page,) = until(follower, lambda page: bool(page.groups))
    assert [view.id for view in page.groups] == list(range(237, 301))
    assert page.notes[0].startswith("236 groups are not shown")
    stream.put_many([[numbered(number)] for number in range(2)])
    stream.take(301, timeout=0).ack()
    (page,) = until(follower, lambda page: bool(page.groups))
    assert [view.id for view in page.groups] == [302]
    assert page.notes[0].startswith("1 groups are not shown")


@pytest.mark.parametrize("url", ["fake"], indirect=True)
def test_partitions_are_followed_together(client: Client, namespace: str) -> None:
    with redrb.ExperienceStream(client, "math", namespace=namespace, partitions=2) as stream:
        stream.put(numbered(0))
        follower = Follower(client, "math", namespace=namespace)
        made = [stream.put(numbered(number))[0] for number in range(4)]
        found: list[int] = []

        def all_found(page: Page) -> bool:
            found.extend(view.id for view in page.groups)
            return len(found) == 4

        until(follower, all_found)
        assert sorted(found) == sorted(made)
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
            follower = Follower(client, "math", namespace=namespace, timeout_s=1)
            stream.put(numbered(4))
            until(follower, lambda page: bool(page.groups))
            server.kill()
            with pytest.raises(StoreUnavailable, match="not reachable"):
                follower.next(0.5)
            server.start()
            stream.put(numbered(5))
            pages = until(follower, lambda page: bool(page.groups))
            assert any("created anew" in note for page in pages for note in page.notes)
            assert [view.reward for view in pages[-1].groups] == [5.0]
