"""A planned failover makes the primary a replica between a write and its confirmation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from threading import Timer

import pytest

import redrb
from redrb.connection.transport import Replication, Reply
from redrb.errors import StoreError, StoreUnavailable
from tests.samples import numbered, numbers
from tests.servers import Server

pytestmark = pytest.mark.long

NOWHERE = ("REPLICAOF", "127.0.0.1", "1")
"""It becomes a replica and keeps its data, since nobody answers there."""


@pytest.fixture
def pair(own_server: Callable[..., Server]) -> Iterator[Server]:
    """A primary that one replica follows."""
    primary = own_server("--repl-diskless-sync-delay", "0")
    own_server("--replicaof", "127.0.0.1", str(primary.port))
    return primary


@pytest.fixture
def demote(pair: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Arm it: the primary is a replica when the next confirmation is asked for, for half a second.

    With `forever=True` it stays a replica.
    """
    divide, armed, timers = Replication.divide, [], []

    def demoted(self: Replication, replies: list[Reply]) -> tuple[list[Reply], Reply]:
        done, confirmed = divide(self, replies)
        if armed:
            forever = armed.pop()
            other.execute(*NOWHERE)
            with pytest.raises(StoreError, match="WAIT cannot be used") as refused:
                other.execute("WAIT", "1", "1")
            confirmed = refused.value.__cause__
            if not forever:
                timers.append(Timer(0.5, other.execute, ("REPLICAOF", "NO", "ONE")))
                timers[-1].start()
        return done, confirmed

    def arm(*, forever: bool = False) -> None:
        armed.append(forever)

    with redrb.connect(pair.url) as other:
        monkeypatch.setattr(Replication, "divide", demoted)
        yield arm
        for timer in timers:
            timer.join()
        assert not armed, "no confirmation was asked for"


def test_a_put_is_repeated_once_the_server_is_a_primary_again(pair, demote):
    with (
        redrb.connect(pair.url, retry_s=30) as client,
        redrb.ExperienceStream(client, "math", min_replicas=1) as stream,
    ):
        demote()
        stream.put(numbered(1))
        assert numbers(stream.take(1, timeout=0)) == [1]
        assert len(stream) == 0


def test_rows_are_put_and_cleared_once_the_server_is_a_primary_again(pair, demote):
    with redrb.connect(pair.url, retry_s=30, min_replicas=1) as client:
        table = redrb.Table(client, "rows")
        demote()
        table.put(["a", "b"], {"x": [1, 2]})
        demote()
        assert table.clear(["a"]) == 1
        assert list(table.tags().rows) == ["b"]
        assert table.get(["b"], ["x"])["x"] == [2]


def test_a_put_that_stays_unconfirmed_says_what_happened(pair, demote):
    with (
        redrb.connect(pair.url, retry_s=0) as client,
        redrb.ExperienceStream(client, "math", min_replicas=1) as stream,
    ):
        demote(forever=True)
        wanted = "stored the put, but it became a replica"
        with pytest.raises(StoreUnavailable, match=wanted) as caught:
            stream.put(numbered(1))
        assert caught.value.uncertain
