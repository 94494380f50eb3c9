"""Replies are lost, scripts are forgotten, connections break: everything still happens once."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import redis
from redis.exceptions import ConnectionError as Broken

from redrb import ExperienceStream, LeaseLost, StoreUnavailable
from redrb.connection import Client
from redrb.connection.transport import Pipeline
from redrb.stream.take.cause import Cause
from redrb.stream.task.calls import Clear
from tests.audit import audit
from tests.samples import numbered, numbers

WHEN = ["before", "middle", "after"]
"""The connection breaks before anything was sent, when half was, after all was executed."""


class Line:
    """Cuts a client's next requests off, one for each entry of `cuts`."""

    def __init__(self, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cuts: list[str] = []
        self.requests = 0
        self._exchange = client.exchange
        self._once = client.once
        self._client = client
        monkeypatch.setattr(client, "exchange", self.exchange)
        monkeypatch.setattr(client, "once", self.once)

    def exchange(self, pipeline: Pipeline) -> list[Any]:
        return self._cut(lambda: self._exchange(pipeline), pipeline)

    def once(self, *arguments: Any) -> Any:
        pipeline = Pipeline()
        pipeline.add(*arguments)
        return self._cut(lambda: self._once(*arguments), pipeline)

    def _cut(self, request: Callable[[], Any], pipeline: Pipeline) -> Any:
        self.requests += 1
        cut = self.cuts.pop(0) if self.cuts else ""
        if cut == "middle":
            self._send_half(pipeline)
        if cut in ("before", "middle"):
            raise Broken(f"cut {cut}")
        try:
            reply = request()
        except redis.exceptions.NoScriptError:
            self.cuts[:0] = [cut] * bool(cut)  # nothing was executed yet
            raise
        if cut == "after":
            raise Broken("cut after")
        return reply

    def _send_half(self, pipeline: Pipeline) -> None:
        if self._client.url.startswith("fake://"):
            return  # fakeredis executes command by command, without a connection to break
        with self._client.connection() as connection:
            whole = b"".join(pipeline._parts)
            connection.send_packed_command([whole[: len(whole) // 2]])
            connection.disconnect()


@pytest.fixture
def line(client, monkeypatch):
    return Line(client, monkeypatch)


@pytest.fixture
def stream(client, namespace, line):
    with ExperienceStream(client, "math", namespace=namespace, limit=8) as stream:
        yield stream
        line.cuts.clear()
        audit(stream)
        assert stream.stats().ledger.balanced


@pytest.mark.every_server
@pytest.mark.parametrize("when", WHEN)
def test_a_put_lands_once(stream, line, when):
    stream.put(numbered(0))
    line.cuts = [when] * 3
    first, second = stream.put_many([[numbered(1)], [numbered(2)]])
    assert line.cuts == []
    line.cuts = [when]
    third = stream.put(numbered(3))[0]
    assert first < second < third
    lease = stream.take(4, timeout=0)
    assert lease.ids[1:] == (first, second, third)
    assert numbers(lease) == [0, 1, 2, 3]
    assert stream.stats().samples_put == 4


@pytest.mark.parametrize("when", WHEN)
def test_a_put_that_evicts_lands_once_and_evicts_once(client, namespace, stream, line, when):
    with ExperienceStream(client, "math", namespace=namespace, on_full="drop_oldest") as evicting:
        evicting.put_many([[numbered(n)] for n in range(8)])
        line.cuts = [when] * 4
        evicting.put_many([[numbered(8)], [numbered(9)]])
        assert line.cuts == []
        audit(stream)
        assert numbers(stream.take(8, timeout=0)) == list(range(2, 10))


@pytest.mark.parametrize("when", WHEN)
def test_a_put_larger_than_the_room_lands_once(stream, line, when):
    stream.put_many([[numbered(n)] for n in range(5)])
    line.cuts = ["", when, "", when, when, when, when, when]
    with pytest.raises(Exception, match="full") as caught:
        stream.put_many([[numbered(n)] for n in range(5, 10)], timeout=0.01)
    assert caught.value.stored == 3
    assert numbers(stream.take(8, timeout=0)) == list(range(8))


@pytest.mark.every_server
@pytest.mark.parametrize("when", WHEN)
def test_a_take_leases_once(stream, line, when):
    stream.put_many([[numbered(n)] for n in range(6)])
    line.cuts = [when] * 3
    lease = stream.take(2, timeout=0)
    assert line.cuts == []
    assert numbers(lease) == [0, 1]
    assert stream.stats().ledger.leased == 2
    lease.ack()
    line.cuts = [when]
    assert numbers(stream.take(4, timeout=0)) == [2, 3, 4, 5]


@pytest.mark.every_server
@pytest.mark.parametrize(
    ("end", "when", "expected"),
    [
        *(("ack", when, {"acked": 2, "waiting": 1}) for when in WHEN),
        ("release", "after", {"waiting": 3}),
        ("reject", "after", {"dead": 2, "waiting": 1}),
        ("fail", "after", {"waiting": 3}),
    ],
)
def test_a_lease_ends_once(stream, line, when, end, expected):
    stream.put_many([[numbered(n)] for n in range(3)])
    lease = stream.take(2, timeout=0)
    line.cuts = [when] * 3
    lease._end(end, None, Cause("bad"))
    assert line.cuts == []
    stats = stream.stats()
    counts = {name: number for name, number in stats.ledger.as_dict().items() if number}
    assert counts == {"put": 3, **expected}
    assert stats.samples_acked == expected.get("acked", 0)
    assert stats.returned == expected["waiting"] - 1
    assert len(stream.dead_letters()) == expected.get("dead", 0)


def test_a_release_that_is_repeated_takes_nothing_from_the_next_consumer(
    client, namespace, stream, line
):
    with ExperienceStream(client, "math", namespace=namespace) as other:
        stream.put_many([[numbered(n)] for n in range(2)])
        stream.take(2, timeout=0).release()
        lease = stream.take(2, timeout=0)
        taken = []
        exchange = line.exchange

        def other_is_faster(pipeline):
            client.exchange = exchange
            exchange(pipeline)
            taken.append(other.take(1, timeout=0))
            raise Broken("cut after")

        client.exchange = other_is_faster
        lease.release([1])
        audit(stream)
        assert stream.stats().ledger.leased == 2
        assert numbers(taken[0]) == [0]
        taken[0].ack()
        lease.ack()
        assert stream.stats().ledger.acked == 2


@pytest.fixture
def hasty(url, monkeypatch):
    """A client that gives up at once."""
    import redrb

    with redrb.connect(url, retry_s=0) as client:
        yield client, Line(client, monkeypatch)


def test_groups_that_an_abandoned_take_leased_are_returned_by_the_next_take(hasty, namespace):
    client, line = hasty
    with ExperienceStream(client, "math", namespace=namespace) as stream:
        stream.put_many([[numbered(n)] for n in range(4)])
        line.cuts = ["after"]
        with pytest.raises(StoreUnavailable):
            stream.take(2, timeout=0)
        lease = stream.take(2, timeout=0)
        assert numbers(lease) == [0, 1]
        audit(stream)
        assert stream.stats().ledger.leased == 2
        lease.ack()
        assert numbers(stream.take(2, timeout=0)) == [2, 3]


def test_the_error_of_a_put_that_is_given_up_says_that_it_may_have_arrived(hasty, namespace):
    client, line = hasty
    with ExperienceStream(client, "math", namespace=namespace) as stream:
        line.cuts = ["after"]
        with pytest.raises(StoreUnavailable) as caught:
            stream.put(numbered(1))
        assert caught.value.uncertain
        assert caught.value.where == client.where
        assert stream.put(numbered(2)) == (2,)
        assert numbers(stream.take(2, timeout=0)) == [1, 2]


def test_an_ack_that_was_given_up_can_be_repeated(hasty, namespace):
    client, line = hasty
    with ExperienceStream(client, "math", namespace=namespace) as stream:
        stream.put_many([[numbered(n)] for n in range(2)])
        lease = stream.take(2, timeout=0)
        line.cuts = ["after"]
        with pytest.raises(StoreUnavailable):
            lease.ack()
        lease.ack()
        with pytest.raises(LeaseLost):
            lease.ack()
        assert stream.stats().ledger.acked == 2
        assert stream.stats().samples_acked == 2


@pytest.mark.every_server
def test_scripts_that_the_server_forgot_are_sent_again(client, namespace, stream):
    def forget():
        client.execute("SCRIPT", "FLUSH")

    forget()
    stream.put(numbered(0))
    with stream.writer() as writer:
        for number in (1, 2):
            forget()
            writer.put(numbered(number))
    forget()
    assert len(stream) == 3
    forget()
    lease = stream.take(2, timeout=0)
    forget()
    stream._consumer.beat()
    forget()
    lease.ack(lease.ids[:1])
    forget()
    lease.release()
    forget()
    stream.join_group()
    forget()
    assert numbers(stream.take(2, timeout=0)) == [1, 2]
    audit(stream)
    forget()
    stream.drop_group()
    forget()
    assert stream.clear() == 2


@pytest.mark.parametrize("cut", WHEN)
def test_a_repeated_clear_returns_the_groups_of_the_first(stream, line, cut):
    stream.put_many([[numbered(1)], [numbered(2)]])
    line.cuts = [cut, cut]
    assert stream.clear() == 2
    assert stream.clear() == 0


def test_a_repeated_clear_spares_a_task_that_was_created_meanwhile(client, stream):
    stream.put(numbered(1))
    first, clear = stream.incarnation.encode(), Clear("who", 1000)
    assert stream._task.store.call(clear, first) == 1
    stream.put_many([[numbered(2)], [numbered(3)]])
    assert stream._task.store.call(clear, first) is None
    assert numbers(stream.take(2, timeout=0)) == [2, 3]
    assert stream._task.store.call(clear, stream.incarnation.encode()) == 2


def test_a_retry_is_logged_with_what_it_waits_for(stream, line, caplog):
    line.cuts = ["before"]
    with caplog.at_level(logging.WARNING, "redrb"):
        stream.put(numbered(1))
    assert re.search("is away: ConnectionError; a request is repeated for [0-9]+ s", caplog.text)
    assert re.search("recovered after [0-9.]+ s: Redis at .* is away", caplog.text)


@pytest.mark.parametrize(
    "error",
    [
        redis.exceptions.BusyLoadingError("LOADING Redis is loading the dataset in memory"),
        redis.exceptions.ReadOnlyError("You can't write against a read only replica."),
        redis.exceptions.TimeoutError("Timeout reading from socket"),
        redis.exceptions.MasterDownError("Link with MASTER is down"),
        redis.exceptions.ResponseError("NOREPLICAS Not enough good replicas to write."),
        redis.exceptions.ResponseError("BUSY Redis is busy running a script."),
    ],
    ids=lambda error: type(error).__name__ + str(error)[:4],
)
def test_a_put_is_repeated_after_a_transient_error(stream, client, monkeypatch, error):
    exchange, errors = client.exchange, [error]

    def failing(pipeline):
        if errors:
            raise errors.pop()
        return exchange(pipeline)

    monkeypatch.setattr(client, "exchange", failing)
    assert len(stream.put(numbered(1))) == 1
    assert len(stream) == 1
