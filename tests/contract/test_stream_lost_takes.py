"""A take whose reply is lost, and a loop that is left, keep no groups from other consumers."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from redis.exceptions import ConnectionError as Broken

import redrb
from redrb import ExperienceStream, Lease, Mixture
from redrb.connection import Client
from redrb.connection.transport import Pipeline
from redrb.errors import BatchTimeout, LeaseLost, StoreError, StoreUnavailable
from redrb.lua.calls import Found
from redrb.stream.take.calls import Drop, Take, TakeRequest
from redrb.stream.take.loop import LeaseLoop
from redrb.stream.take.read_ahead import ReadAhead
from redrb.stream.task.store import TaskStore
from tests.audit import audit
from tests.samples import numbered, numbers
from tests.scenes import until

LATER_S = 5.0
"""Longest time until groups are back; a beat comes every 10 s, so it cannot be an ordinary one."""


@pytest.fixture
def impatient(url):
    """A client that gives up at once when a reply is lost."""
    with redrb.connect(url, retry_s=0) as client:
        yield client


@pytest.fixture
def stream(impatient, namespace):
    with ExperienceStream(impatient, "math", namespace=namespace) as stream:
        stream.put(numbered(9))
        stream.take(1, timeout=0).ack()  # from now on the server knows the scripts
        stream.put_many([[numbered(n)] for n in range(4)])
        yield stream
        audit(stream)


@pytest.fixture
def other(client, namespace):
    with ExperienceStream(client, "math", namespace=namespace) as other:
        yield other


def lose_reply(
    monkeypatch: pytest.MonkeyPatch, owner: type, method: str, error: BaseException
) -> None:
    """Let the server do one request, and raise `error` instead of its reply."""
    real = getattr(owner, method)

    def lost(*given: Any) -> Any:
        replies = real(*given)
        if any(isinstance(reply, bytes) and b"taken" in reply for reply in replies):
            monkeypatch.setattr(owner, method, real)
            raise error
        return replies

    monkeypatch.setattr(owner, method, lost)


@pytest.mark.parametrize("error", [Broken("Connection closed by server."), KeyboardInterrupt()])
def test_groups_of_a_take_whose_reply_was_lost_come_back(stream, other, monkeypatch, error):
    held = stream.take(1, timeout=0)
    lose_reply(monkeypatch, Client, "exchange", error)
    with pytest.raises((StoreUnavailable, KeyboardInterrupt)):
        stream.take(3, timeout=0)
    assert numbers(other.take(3, timeout=LATER_S)) == [1, 2, 3]
    assert other.stats().taken_over == 0
    held.ack()


def test_groups_of_a_prefetched_batch_whose_reply_was_lost_come_back(stream, other, monkeypatch):
    loop = stream.leases(1, timeout=20, prefetch=1)
    lose_reply(monkeypatch, Client, "exchange", Broken("Connection closed by server."))
    assert len(next(loop)) == 1  # of another take
    loop.close()
    assert numbers(other.take(4, timeout=LATER_S)) == [0, 1, 2, 3]


def test_groups_whose_lost_take_was_part_of_a_mixture_come_back(
    impatient, stream, other, namespace, monkeypatch
):
    with (
        Mixture(impatient, {"math": 1.0, "code": 1.0}, namespace=namespace) as mixture,
        ExperienceStream(impatient, "code", namespace=namespace) as code,
    ):
        code.put_many([[numbered(n)] for n in range(4)])
        lose_reply(monkeypatch, Client, "exchange", KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            mixture.take(8, timeout=0)
        assert len(other.take(4, timeout=LATER_S)) == 4
        assert len(code.take(4, timeout=LATER_S)) == 4
        code.clear()


def test_a_take_that_was_given_up_and_arrives_late_leases_nothing(stream):
    slot = stream._consumer.occupy()
    store = stream._task.store
    drop = Drop("default", slot.name, slot.token)
    assert [page.found for page in store.pages(drop)] == [0]
    late = stream._taker._request(slot, TakeRequest(4, 4), 0, None, report=False)
    assert late.result().outcome == "late"
    slot.free()
    first = stream.take(4, timeout=0)  # a take of the same slot came before the drop
    assert [page.found for page in store.pages(drop)] == [0]
    first.ack()
    assert store.call(drop) == Found(more=False, found=0)


def test_a_large_batch_is_given_up_in_parts(stream):
    stream.put_many([[numbered(n)] for n in range(116)])
    slot = stream._consumer.occupy()
    wanted = TakeRequest(120, 120)
    assert stream._taker._request(slot, wanted, 0, None, report=False).result().outcome == "taken"
    store = stream._task.store
    drop = Drop("default", slot.name, slot.token)
    assert [page.found for page in store.pages(drop)] == [50, 50, 20]
    assert len(stream.take(120, timeout=0)) == 120


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_block_over_leases_gives_both_batches_back(stream, other, prefetch):
    with stream.leases(2, timeout=0, prefetch=prefetch) as loop:
        for lease in loop:
            assert numbers(lease) == [0, 1]
            break
    assert numbers(other.take(4, timeout=LATER_S)) == [0, 1, 2, 3]
    assert not lease


@pytest.mark.parametrize("prefetch", [0, 1])
def test_an_exception_that_is_kept_keeps_no_batch(stream, other, prefetch):
    kept: list[tuple[BaseException, Lease]] = []
    try:
        for lease in stream.leases(2, timeout=0, prefetch=prefetch):
            raise ValueError(len(lease))
    except ValueError as error:
        kept.append((error, lease))
    assert numbers(other.take(4, timeout=LATER_S)) == [0, 1, 2, 3]


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_loop_that_took_only_one_batch_gives_it_back_at_once(stream, other, prefetch):
    for lease in stream.leases(4, timeout=0, prefetch=prefetch):
        assert len(lease) == 4
        break
    assert len(other.take(4, timeout=LATER_S)) == 4


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_loop_that_is_kept_ends_with_its_stream(stream, other, prefetch):
    loop = stream.leases(2, timeout=0, prefetch=prefetch)
    next(loop)
    with pytest.raises(BatchTimeout):
        other.take(4, timeout=0)
    stream.close()
    assert len(other.take(4, timeout=LATER_S)) == 4
    loop.close()


def trained_with_the_next_one_ahead(stream: ExperienceStream) -> tuple[LeaseLoop, Lease]:
    """Return a loop and its first lease; the batch after it is leased as well."""
    stream.put_many([[numbered(n)] for n in range(4, 8)])
    loop = stream.leases(4, timeout=0, prefetch=1)
    lease = next(loop)
    until(lambda: stream.stats().ledger.leased == 8)
    return loop, lease


def test_a_lost_lease_in_pages_keeps_no_batch_that_was_taken_ahead(stream, other, pages):
    pages(ended=3)  # the next take acknowledges the last page, another request those before
    loop, lease = trained_with_the_next_one_ahead(stream)
    assert other.settle({lease.ids[0]: 1}, incarnation=lease.incarnation) == 1
    with pytest.raises(LeaseLost) as kept:
        next(loop)
    assert numbers(other.take(7, timeout=LATER_S)) == [1, 2, 3, 4, 5, 6, 7]
    assert kept.value.ids


def test_an_outage_between_pages_keeps_no_batch_that_was_taken_ahead(
    stream, other, pages, monkeypatch
):
    pages(ended=3)
    loop, _ = trained_with_the_next_one_ahead(stream)
    real = Client.exchange

    def broken(client: Client, pipeline: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            return real(client, pipeline)
        raise Broken("Connection closed by server.")

    monkeypatch.setattr(Client, "exchange", broken)
    with pytest.raises(StoreUnavailable):
        next(loop)
    monkeypatch.setattr(Client, "exchange", real)
    assert len(other.take(8, timeout=LATER_S)) == 8


def test_an_interrupt_before_the_next_take_keeps_no_batch_that_was_taken_ahead(
    stream, other, monkeypatch
):
    loop, _ = trained_with_the_next_one_ahead(stream)

    def interrupted(*given: Any, **named: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(ReadAhead, "_read_with", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(loop)
    assert len(other.take(8, timeout=LATER_S)) == 8


@pytest.mark.parametrize("place", [{}, {"rank": 0, "world_size": 1, "step": 0}])
def test_groups_of_a_take_that_was_interrupted_when_it_was_sent_come_back(
    stream, other, monkeypatch, place
):
    real = Pipeline.send

    def interrupted(pipeline: Pipeline, connection: Any) -> None:
        real(pipeline, connection)
        if b"XREADGROUP" in pipeline.freeze():
            monkeypatch.undo()
            until(lambda: other.stats().ledger.leased == 4)
            raise KeyboardInterrupt

    monkeypatch.setattr(Pipeline, "send", interrupted)
    with pytest.raises(KeyboardInterrupt):
        stream.take(4, timeout=5, **place)
    assert numbers(other.take(4, timeout=LATER_S)) == [0, 1, 2, 3]
    assert not stream._consumer._leased


def test_a_part_that_cannot_be_released_yet_is_tried_again(stream, other, monkeypatch):
    real, tries = TaskStore.pages, []

    def pages(store, call, **options):
        if isinstance(call, Drop):
            tries.append(call)
            if len(tries) == 1:
                raise StoreError("not now")
        return real(store, call, **options)

    monkeypatch.setattr(TaskStore, "pages", pages)
    lose_reply(monkeypatch, Client, "exchange", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        stream.take(4, timeout=0)
    end = time.monotonic() + LATER_S
    while not tries:
        assert time.monotonic() < end
        time.sleep(0.01)
    stream._consumer.nudge()
    assert len(other.take(4, timeout=LATER_S)) == 4
    assert len(tries) == 2


def test_a_delayed_take_changes_nothing(stream):
    stream.put_many([[numbered(n)] for n in range(4, 9)])
    stream.take(1, timeout=0).ack()
    with stream.take(2, timeout=0) as lease:
        pass
    slot = f"{stream._consumer.name}/0"
    for held in (False, True):
        if held:
            lease = stream.take(1, timeout=0)
        before = stream.stats()
        for token in ("1", "2"):
            who = ("default", stream._consumer.name, slot, token, TakeRequest(2, 2))
            take = Take(*who, "w", 3000, 30_000, stream.incarnation)
            assert stream._task.store.call(take).outcome == "late"
        assert stream.stats() == before
    lease.ack()
    assert numbers(stream.take(5, timeout=0)) == [4, 5, 6, 7, 8]


@pytest.mark.parametrize("again", ["free", "give_up", "release", "count"])
def test_a_slot_that_was_freed_is_freed_for_one_lease_only(stream, again):
    """Frees of one slot from two places leave a lease alone that another thread has put there."""
    first = stream.take(1, timeout=0)
    slot = first.parts[0].holder
    first.ack()
    second = stream.take(2, timeout=0)
    assert second.parts[0].holder.number == slot.number
    {
        "free": slot.free,
        "give_up": slot.give_up,
        "release": lambda: slot.release([]),
        "count": lambda: slot.count(-1),
    }[again]()
    third = stream.take(1, timeout=0)
    assert third.parts[0].holder.number != slot.number
    assert stream._consumer.held == 3
    second.ack()
    third.ack()
    assert stream.stats().ledger.acked == 5
