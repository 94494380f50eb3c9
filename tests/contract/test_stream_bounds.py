"""No script of a stream takes long, however much there is: work is cut, or found by an index."""

from __future__ import annotations

from typing import Any

import pytest

from redrb import BatchTimeout, ExperienceStream, Status, make_experience_batch
from redrb.connection import Client
from redrb.errors import StoreError
from redrb.experience import Experience
from redrb.lua.calls import Call
from redrb.stream.take.calls import Take, TakeRequest
from redrb.stream.task.calls import Join
from tests.audit import audit
from tests.samples import numbered, numbers

pytestmark = pytest.mark.slow  # a minute of many groups


def stream_of(client: Client, namespace: str, **options: Any) -> ExperienceStream:
    return ExperienceStream(client, "math", namespace=namespace, **options)


def many(count: int, **changes: Any) -> Experience:
    return make_experience_batch([numbered(n % 1000, **changes) for n in range(count)])


def watch(stream: ExperienceStream, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note the scripts that a stream runs one by one."""
    ran: list[str] = []
    original = stream._task.store.call

    def noting(call: Call[Any], *beside: bytes, **options: Any) -> Any:
        ran.append(call.script)
        return original(call, *beside, **options)

    monkeypatch.setattr(stream._task.store, "call", noting)
    return ran


@pytest.mark.parametrize("start", [None, 500])
def test_a_consumer_group_joins_page_by_page(
    client: Client, namespace: str, monkeypatch: pytest.MonkeyPatch, start: int | None
) -> None:
    stream = stream_of(client, namespace, order="lifo", keep_groups=9000, tags=["score"])
    stream.join_group()
    stream.put(many(3000, tags={"score": 1.0}))
    stream.take(1000, timeout=0).ack()
    late = stream_of(client, namespace, group="late")
    ran = watch(late, monkeypatch)
    assert late._task.store.call(Join("late", "" if start is None else str(start))).more
    stream.put(numbered(1), tags={"score": 2.0})  # meanwhile
    stream.take(1, timeout=0).ack()
    late.join_group(start)
    assert ran.count("task/join") > 2
    expected = 2001 if start is None else 2502
    assert late.stats().ledger.waiting == expected
    assert late.stats().ledger.balanced
    assert late.count(where={"score_gt": 0}) == expected
    audit(stream)
    late.put(numbered(2))
    assert numbers(late.take(1, timeout=0)) == [2]
    late.take(1500, timeout=0).ack()
    audit(stream)


@pytest.mark.parametrize("call", ["take", "move", "expire"])
def test_the_first_call_of_a_consumer_group_joins_page_by_page(
    client: Client, namespace: str, call: str
) -> None:
    stream = stream_of(client, namespace, order="stalest")
    stream.join_group()
    stream.put(many(2500, policy_version=5))
    stream.put(numbered(7), policy_version=1)
    late = stream_of(client, namespace, group="late")
    if call == "take":
        assert numbers(late.take(1, timeout=60)) == [7]
    elif call == "move":
        assert late.move([2501], Status.ABORTED) == 1
    else:
        assert late.expire(5, max_staleness=3) == 1
    ledger = late.stats().ledger
    assert ledger.put == 2501
    assert ledger.balanced
    audit(stream)


def test_a_take_expires_page_by_page_and_never_leases_a_group_that_is_too_stale(
    client: Client, namespace: str
) -> None:
    stream = stream_of(client, namespace, max_staleness=2)
    stream.join_group()
    stream.put(many(2300, policy_version=1))
    stream.put(numbered(7), policy_version=9)
    stream.advance(9)
    expired, unfinished = 0, True
    while unfinished:  # on a busy machine the time of one take is up before all have expired
        with pytest.raises(BatchTimeout) as caught:
            stream.take(2, timeout=0)
        expired, unfinished = expired + caught.value.expired, caught.value.unfinished
    assert (expired, caught.value.available) == (2300, 1)
    audit(stream)
    stream.put(many(2300, policy_version=9))
    stream.advance(20)
    stream.put(numbered(8), policy_version=20)
    loop = stream.leases(1, timeout=60)
    assert numbers(next(loop)) == [8]
    loop.close()
    stream.close()


def test_many_groups_move_a_part_at_a_time(
    client: Client, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = stream_of(client, namespace, order="lifo")
    ids = stream.put(many(2500))
    stream.join_group()
    ran = watch(stream, monkeypatch)
    assert stream.move(ids, Status.ABORTED) == 2500
    assert ran.count("task/move") == 25
    audit(stream)


@pytest.mark.parametrize("settings", [{}, {"order": "lifo"}])
def test_evictions_find_the_oldest_behind_a_lease(
    client: Client, namespace: str, settings: dict[str, Any]
) -> None:
    """The oldest group is leased, and thousands after it are gone."""
    stream = stream_of(client, namespace, limit=40, on_full="drop_oldest", **settings)
    critic = stream_of(client, namespace, group="critic")
    stream.join_group()
    critic.join_group()
    oldest = stream.put(numbered(0))
    held = next(lease for lease in [stream.take(1, timeout=0)] if lease.ids == oldest)
    for start in range(1, 3000, 20):
        stream.put(make_experience_batch([numbered(n % 1000) for n in range(start, start + 20)]))
    audit(stream)
    before = calls(client)
    stream.put(numbered(1))
    assert calls(client) - before < 150
    held.release()
    audit(stream)
    stream.put(numbered(2))  # the oldest waits again, and is the first to go
    assert stream.read(oldest) == [None]
    audit(stream)


def test_groups_that_another_consumer_group_leases_are_evicted_after_their_release(
    client: Client, namespace: str
) -> None:
    stream = stream_of(client, namespace, capacity=4, keep_groups=3)
    critic = stream_of(client, namespace, group="critic")
    critic.join_group()
    stream.join_group()
    ids = stream.put_many([[numbered(n)] for n in range(4)])
    held = critic.take(3, timeout=0)
    stream.put_many([[numbered(n)] for n in range(4, 8)])
    assert [group is None for group in stream.read(ids)] == [False, False, False, True]
    held.ack(held.ids[:1])
    held.reject("bad", held.ids[:1])
    audit(stream)
    stream.put_many([[numbered(n)] for n in range(8, 10)])
    assert [group is None for group in stream.read(ids)] == [True, True, False, True]
    critic.drop_group()
    stream.put(numbered(10))
    assert stream.read(ids) == [None] * 4
    audit(stream)


def test_a_wide_gap_is_jumped(client: Client, namespace: str) -> None:
    stream = stream_of(client, namespace, order="lifo", keep_groups=10)
    stream.join_group()
    stream.put(numbered(0))
    held = stream.take(1, timeout=0)
    stream.put(many(3000))
    stream.take(3000, timeout=0).ack()
    stream.put_many([[numbered(1)], [numbered(2)]])
    small = stream_of(client, namespace, capacity=2)
    before = calls(client)
    small.put(numbered(3))
    assert calls(client) - before < 150
    audit(stream)
    held.release()
    small.put(numbered(4))
    assert sorted(numbers(stream.take(2, timeout=0))) == [3, 4]


def test_a_capacity_that_is_given_late_is_reached_by_and_by(client: Client, namespace: str) -> None:
    stream = stream_of(client, namespace, order="lifo")
    stream.join_group()
    stream.put(many(250))
    small = stream_of(client, namespace, capacity=10)
    small.put(numbered(0))
    assert small.stats().stored == 251 - 101
    for _ in range(2):
        small.put(numbered(0))
    assert small.stats().stored == 10
    audit(stream)


@pytest.mark.parametrize("settings", [{}, {"order": "lifo"}])
def test_a_limit_that_is_given_late_is_reached_before_a_put(
    client: Client, namespace: str, settings: dict[str, Any]
) -> None:
    stream = stream_of(client, namespace, **settings)
    stream.put(many(2500))
    small = stream_of(client, namespace, limit=10, on_full="drop_oldest")
    small.put(numbered(0))
    assert small.stats().stored == 10
    audit(stream)


def test_a_delayed_take_changes_nothing(client: Client, namespace: str) -> None:
    stream = stream_of(client, namespace)
    stream.put_many([[numbered(n)] for n in range(9)])
    stream.take(1, timeout=0).ack()
    with stream.take(2, timeout=0) as lease:
        pass
    slot = f"{stream._consumer.name}/0"
    for held in (False, True):
        if held:
            lease = stream.take(1, timeout=0)
        before = stream.stats()
        for token in ("1", "2"):
            take = Take(
                *("default", stream._consumer.name, slot, token, TakeRequest(2, 2), "w"),
                *(3000, 30_000, stream._task.description.incarnation),
            )
            assert stream._task.store.call(take).outcome == "late"
        assert stream.stats() == before
    lease.ack()
    assert numbers(stream.take(5, timeout=0)) == [4, 5, 6, 7, 8]
    audit(stream)


def calls(client: Client) -> int:
    """Return how many commands the server has run, those of scripts included; 0 of a fake one."""
    try:
        statistics = client.execute("INFO", "commandstats").decode()
    except StoreError:
        return 0
    lines = [line for line in statistics.splitlines() if line.startswith("cmdstat_")]
    return sum(int(line.split("calls=")[1].split(",")[0]) for line in lines)
