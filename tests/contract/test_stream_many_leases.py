"""Consumers that hold many leases and large ones: no group is lost or trained twice."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from redrb import ExperienceStream, LeaseLost
from redrb.stream.take.cause import NO_CAUSE
from tests.audit import audit, kill_consumer
from tests.conftest import Opener
from tests.samples import numbered, numbers

Pages = Callable[..., None]


def filled(open_stream: Opener, groups: int, **settings: int) -> ExperienceStream:
    """Return a stream with so many groups of one sample."""
    stream = open_stream(**settings)
    stream.put_many([[numbered(number)] for number in range(groups)])
    return stream


def beat_until_idle(stream: ExperienceStream) -> None:
    """Send heartbeats until nothing is left to take over."""
    while stream._consumer._renew().more:
        pass


def test_a_lease_that_is_taken_over_in_part_is_lost_as_a_whole(open_stream, pages):
    """Its consumer was stopped and goes on: what it trained counts for nothing, nothing is lost."""
    pages(taken_over=4)
    stopped, other = filled(open_stream, 13), open_stream()
    lease = stopped.take(13, timeout=0)
    kill_consumer(stopped)
    first = other.take(1, timeout=0)  # one page at most has come back by now
    with pytest.raises(LeaseLost) as lost:
        lease.ack()
    assert lost.value.ids == tuple(range(1, 14))
    first.ack()
    beat_until_idle(stopped)  # the stopped consumer lives again, and requeues its own lost leases
    rest = other.take(12, timeout=0)
    assert len(rest) == 12
    audit(other)


@pytest.mark.parametrize("end", ["ack", "release", "reject", "fail", "expire"])
def test_an_ending_of_a_lost_lease_touches_nothing(open_stream, pages, end):
    pages(taken_over=2)
    stopped, other = filled(open_stream, 5), open_stream()
    lease = stopped.take(5, timeout=0)
    kill_consumer(stopped)
    taken = other.take(2, timeout=0)
    before = other.stats().ledger
    with pytest.raises(LeaseLost):
        getattr(lease, end)(*(["late"] if end in ("reject", "fail") else []))
    assert other.stats().ledger == before
    taken.ack()
    beat_until_idle(other)
    assert numbers(other.take(3, timeout=0)) == [2, 3, 4]


def test_a_consumer_that_was_stopped_takes_again_into_the_slots_of_its_lost_leases(
    open_stream, pages
):
    pages(taken_over=2)
    stopped, other = filled(open_stream, 7), open_stream()
    lease = stopped.take(7, timeout=0)
    kill_consumer(stopped)
    other.take(1, timeout=0).ack()
    with pytest.raises(LeaseLost):
        lease.ack()
    again = stopped.take(6, timeout=0)
    assert again.parts[0].holder.name == f"{stopped._consumer.name}/0"
    assert numbers(again) == [1, 2, 3, 4, 5, 6]


def test_groups_of_a_dead_consumer_come_back_at_once(open_stream):
    """Pages follow each other, and not the rhythm of the heartbeat (once in 10 s here)."""
    dead, other = filled(open_stream, 1000), open_stream()
    other.take(1, timeout=10).ack()
    held = [dead.take(333, timeout=10) for _ in range(3)]
    kill_consumer(dead)
    began = time.monotonic()
    assert len(other.take(999, timeout=10)) == 999
    assert time.monotonic() - began < 9
    assert len(held) == 3


def test_an_acknowledgement_spares_a_group_that_the_lease_gave_back_before(open_stream):
    """The reply to the release was lost, so the consumer still counts the group as its own."""
    stream, other = filled(open_stream, 3), open_stream()
    lease = stream.take(3, timeout=0)
    options = {"reason": NO_CAUSE, "samples": 1, "ends": False}
    lease.parts[0].holder.end_request("release", [2], **options).result()
    taken = other.take(1, timeout=0)
    assert taken.ids == (2,)
    lease.ack()
    ledger = other.stats().ledger
    assert (ledger.acked, ledger.leased) == (2, 1)
    taken.ack()


def test_a_take_that_is_repeated_after_its_lease_was_lost_takes_again(open_stream, monkeypatch):
    """The process was stopped between the take and its reply, for longer than `lease_ms`."""
    stopped, other = filled(open_stream, 3), open_stream()
    taker = stopped._taker
    request = taker._request
    sent: list[str] = []

    def twice(slot, *arguments, **options):
        if not sent:
            sent.append(slot.token)
            request(slot, *arguments, **options).result()
            kill_consumer(stopped)
            other._consumer._renew()
        return request(slot, *arguments, **options)

    monkeypatch.setattr(taker, "_request", twice)
    lease = stopped.take(3, timeout=5)
    assert numbers(lease) == [0, 1, 2]
    lease.ack()
    audit(other)


def test_a_slot_that_is_given_up_after_a_takeover_is_found_again(open_stream):
    """The takeover has forgotten the slot; the consumer lives again and uses it."""
    stopped, other = filled(open_stream, 2), open_stream()
    lease = stopped.take(1, timeout=0)
    kill_consumer(stopped)
    other._consumer._renew()
    lease.parts[0].holder.give_up()
    stopped._consumer.beat()
    stopped.take(1, timeout=0).ack()
    held = stopped.take(1, timeout=0)
    kill_consumer(stopped)
    assert other.take(1, timeout=0).ids == held.ids
    audit(other)


@pytest.mark.parametrize("dies", [False, True])
@pytest.mark.parametrize("leases", [1, 32])
def test_names_that_reads_without_their_takes_have_created_go_when_a_consumer_ends(
    open_stream, dies, leases
):
    """A restarted server does not know the script of a take, but runs the read that follows."""
    stream, other = filled(open_stream, leases), open_stream()
    held = [stream.take(1, timeout=0) for _ in range(leases)]
    store, consumer = stream._task.store, stream._consumer
    never_known = "a-consumer-that-was-killed-in-its-first-take/0"
    names = [never_known, *(f"{consumer.name}/{leases + number}" for number in range(2))]
    for name in names:
        read = ("XREADGROUP", "GROUP", consumer.group, name, "STREAMS", store.keys.stream, "0")
        store.client.execute(*read)
    if dies:
        kill_consumer(stream)
        other.take(leases, at_least=leases, timeout=5).release()
        for lease in held:
            with pytest.raises(LeaseLost):
                lease.ack()
        stream._consumer._leased.clear()
        other._consumer.beat()
    stream.close()
    left = store.client.execute("XINFO", "CONSUMERS", store.keys.stream, consumer.group)
    assert [info[1] for info in left] == ([f"{other._consumer.name}/0".encode()] if dies else [])
    other.close()
    assert store.client.execute("XINFO", "CONSUMERS", store.keys.stream, consumer.group) == []
    assert other.stats().ledger.waiting == leases
