"""Repairs are safe while workers go on, and when what was found is not true any more."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch

import redrb
from redrb import ExperienceStream
from redrb.connection import Client
from redrb.errors import StoreError, StoreFull
from redrb.keys import WeightKeys
from redrb.registry import Registry
from redrb.stream.admission.calls import BeatMaker
from redrb.stream.task.lookup import task_stats
from redrb.stream.task.store import TaskStore
from redrb.watch.doctor import repairs, takeover
from redrb.watch.doctor.checkup import Checkup
from redrb.watch.doctor.examination import examine
from redrb.watch.doctor.repairs import Repair, repair
from redrb.watch.state.reader import StateReader
from tests.audit import audit, kill_consumer
from tests.samples import numbered, numbers
from tests.scenes import silence, until

LEASE_MS = 200


@pytest.fixture(autouse=True)
def no_wait_for_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repairs, "TWO_HEARTBEATS_S", 0.0)


@pytest.fixture
def stream(owner: Client, namespace: str) -> Iterator[ExperienceStream]:
    with ExperienceStream(owner, "math", namespace=namespace, lease_ms=LEASE_MS) as stream:
        stream.join_group()
        yield stream


def checked(client: Client, namespace: str) -> Checkup:
    return Checkup(client, namespace, StateReader(client, namespace).look)


def codes(found: Checkup) -> set[str]:
    return {each.code for each in found.findings if not each.subject.startswith("server")}


def repaired(client: Client, found: Checkup) -> list[Repair]:
    return list(repair(client, found.state, found.examined, found.left_names))


def key(stream: ExperienceStream, name: str) -> str:
    return f"{stream._task.store.keys.prefix}{name}"


def test_leases_of_a_consumer_that_is_known_again_stay(
    owner: Client, namespace: str, stream: ExperienceStream
) -> None:
    stream.put_many([[numbered(number)] for number in range(3)])
    lease = stream.take(2, timeout=5)
    silence(stream)
    owner.execute("DEL", key(stream, "consumers:default"))
    found = checked(owner, namespace)
    assert "lease-without-consumer" in codes(found)
    stream._consumer.beat()
    assert [one.summary[:21] for one in repaired(owner, found)] == ["let 0 of 2 groups of "]
    lease.ack()
    audit(stream)


def test_many_leases_without_any_record_of_their_consumer_wait_again(
    owner: Client, namespace: str, stream: ExperienceStream
) -> None:
    stream.put_many([[numbered(number)] for number in range(120)])
    held = stream.take(110, timeout=5)  # one that is dropped is released by the next heartbeat
    kill_consumer(stream)
    owner.execute("DEL", key(stream, "consumers:default"), key(stream, "leases:default"))
    found = checked(owner, namespace)
    [mended] = repaired(owner, found)
    assert mended.summary.startswith("let 110 of 110 groups of ")
    assert mended.done
    assert stream.stats().ledger.waiting == 120
    assert len(held) == 110
    audit(stream)


def test_leases_without_a_consumer_are_found_behind_many_others(
    owner: Client, namespace: str, stream: ExperienceStream
) -> None:
    stream.put_many([[numbered(number)] for number in range(640)])
    with ExperienceStream(owner, "math", namespace=namespace) as other:
        held = [other.take(600, timeout=5), *(stream.take(1, timeout=5) for _ in range(40))]
        kill_consumer(stream)
        owner.execute("ZREM", key(stream, "consumers:default"), stream.consumer)
        found = checked(owner, namespace)
        [mended] = repaired(owner, found)
        assert mended.summary.startswith("let 40 of 40 groups of ")
        assert "lease-without-consumer" not in codes(checked(owner, namespace))
        assert other.stats().ledger.leased == len(held[0]) == 600
        audit(stream)


def test_a_consumer_that_lives_again_keeps_its_leases(
    owner: Client, namespace: str, stream: ExperienceStream
) -> None:
    stream.put(numbered(1))
    lease = stream.take(1, timeout=5)
    kill_consumer(stream)
    found = checked(owner, namespace)
    assert "dead-consumer" in codes(found)
    owner.execute("ZADD", key(stream, "consumers:default"), "XX", 9e15, stream.consumer)
    [mended] = repaired(owner, found)
    assert (mended.summary[:12], mended.done) == ("let 0 groups", True)
    lease.ack()


@pytest.fixture
def of_dead_maker(owner: Client, namespace: str) -> Iterator[ExperienceStream]:
    """A task in which a dead maker holds three rights."""
    bounds = {"max_staleness": 1, "groups_per_version": 4, "lease_ms": LEASE_MS}
    with ExperienceStream(owner, "begun", namespace=namespace, **bounds) as stream:
        right = stream.admit(3)
        maker = stream._admitter.maker
        assert maker._heartbeat is not None
        maker._heartbeat.stop()
        owner.execute("ZADD", key(stream, "makers"), "XX", 1, maker.name)
        yield stream
        right.cancel()


def test_rights_of_a_dead_maker_where_no_consumer_group_has_joined(
    owner: Client, namespace: str, of_dead_maker: ExperienceStream
) -> None:
    found = checked(owner, namespace)
    assert found.examined[0].consumer_groups == ()
    mended = [(one.summary, one.done) for one in repaired(owner, found)]
    assert mended == [("took 3 rights back", True)]
    assert "lost-rights" not in codes(checked(owner, namespace))
    stats = of_dead_maker.stats().admission
    assert stats is not None
    assert (stats.held, stats.lost) == (0, 3)
    assert owner.execute("ZCARD", key(of_dead_maker, "makers")) == 0


@pytest.mark.parametrize("lives_again", [False, True])
def test_a_repair_of_rights_ends_when_a_maker_beside_it_has_taken_them_back(
    owner: Client,
    namespace: str,
    of_dead_maker: ExperienceStream,
    monkeypatch: pytest.MonkeyPatch,
    *,
    lives_again: bool,
) -> None:
    """Or when the maker that was dead lives again."""
    store, beat_until = of_dead_maker._task.store, takeover._beat_until
    name = of_dead_maker._admitter.maker.name if lives_again else "beside"
    beside = BeatMaker(name, 60_000, takeover._incarnation(store))

    def after_it(beat: Callable[[], int], remain: Callable[[], bool], ms: int) -> tuple[int, bool]:
        until(lambda: store.call(beside).taken_back == 0 and not remain())
        return beat_until(beat, remain, ms)

    monkeypatch.setattr(takeover, "_beat_until", after_it)
    mended = [(one.summary, one.done) for one in repaired(owner, checked(owner, namespace))]
    assert mended == [("took 0 rights back", True)]


def test_orphaned_entries_are_counted_while_trainers_go_on(
    owner: Client, namespace: str, stream: ExperienceStream
) -> None:
    stream.put_many([[numbered(number)] for number in range(4)])
    lease = stream.take(3, timeout=5)
    for _ in range(2):
        owner.execute("XADD", stream._task.store.keys.stream, "9999999999999-*", "g", b"x")
    found = checked(owner, namespace)
    lease.ack()
    assert [one.summary for one in repaired(owner, found)] == ["removed orphaned entries: 2"]
    assert repaired(owner, found)[0].summary == "removed orphaned entries: 0"
    assert numbers(stream.take(1, timeout=5)) == [3]


def test_groups_beyond_a_count_that_was_lost_are_no_orphans(
    owner: Client, namespace: str, stream: ExperienceStream
) -> None:
    stream.put_many([[numbered(number)] for number in range(4)])
    owner.execute("HSET", key(stream, "puts"), "last", 0)
    found = checked(owner, namespace)
    assert "lost-puts" in codes(found)
    assert "orphaned-entries" not in codes(found)
    stale = copy.copy(found)
    stale.examined = (msgspec.structs.replace(found.examined[0], orphans=4, lost_puts=False),)
    assert repaired(owner, stale)[0].summary == "removed orphaned entries: 0"
    assert owner.execute("XLEN", stream._task.store.keys.stream) == 4
    assert [one.done for one in repaired(owner, found)] == [True]
    assert "lost-puts" not in codes(checked(owner, namespace))
    audit(stream)


@pytest.mark.parametrize("orphans", [0, 2, 3, 4, 10])
def test_a_lost_record_of_puts_is_rebuilt(
    owner: Client,
    namespace: str,
    stream: ExperienceStream,
    pages: Callable[..., None],
    orphans: int,
) -> None:
    pages(orphans=3)
    keep = ExperienceStream(owner, "math", namespace=namespace, group="late", lease_ms=LEASE_MS)
    stream.put_many([[numbered(number)] for number in range(5)])
    stream.take(1, timeout=5).ack()
    keep.join_group()
    stream.put_many([[numbered(number)] for number in range(5, 8)])
    held = stream.take(1, timeout=5)
    before = [each.stats().ledger for each in (stream, keep)]
    for _ in range(orphans):
        owner.execute("XADD", stream._task.store.keys.stream, "9999999999999-*", "g", b"x")
    owner.execute("DEL", key(stream, "puts"))
    found = checked(owner, namespace)
    assert {"lost-puts"} == codes(found) & {"lost-puts", "orphaned-entries", "different-storage"}
    # on a busy machine a consumer may have been silent, which is repaired, too
    [mended] = [each for each in repaired(owner, found) if each.code == "lost-puts"]
    assert mended.done
    assert mended.summary.endswith(f"removed orphaned entries: {orphans}")
    assert [each.stats().ledger for each in (stream, keep)] == before
    stream.put(numbered(8))
    held.ack()
    assert numbers(stream.take(7, timeout=5)) == [2, 3, 4, 5, 6, 7, 8]
    audit(stream)
    keep.close()


def test_all_expired_pins_are_removed_and_no_other(owner: Client, namespace: str) -> None:
    keys = WeightKeys.of(namespace, "policy")
    with redrb.WeightPublisher(owner, "policy", namespace=namespace) as publisher:
        publisher.publish({"a": torch.ones(3)})
        pins = [word for n in range(25) for word in (f"reader-{n}", "1 1 1000 60000")]
        owner.execute("HSET", f"{keys.prefix}pins", *pins, "live", f"1 1 {1 << 50} 60000")
        found = checked(owner, namespace)
        assert [one.summary for one in repaired(owner, found)] == ["removed 25 expired pins"]
        assert owner.execute("HKEYS", f"{keys.prefix}pins") == [b"live"]


def test_a_name_whose_task_was_created_meanwhile_stays(owner: Client, namespace: str) -> None:
    registry = Registry(owner, namespace)
    registry.add("task", "late")
    found = checked(owner, namespace)
    assert "name-without-task" in codes(found)
    with ExperienceStream(owner, "late", namespace=namespace):
        [kept] = repaired(owner, found)
        assert (kept.summary, kept.done) == (
            "kept the name of task late in the registry: it exists now",
            True,
        )
        assert registry.has("task", "late")


def test_a_server_at_its_memory_limit_fails_one_repair_only(
    owner: Client, namespace: str, stream: ExperienceStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = TaskStore.of(owner, namespace, "math")
    task = examine(store)
    assert task is not None
    Registry(owner, namespace).add("task", "gone")
    found = checked(owner, namespace)
    found.examined = (msgspec.structs.replace(task, orphans=1),)

    def full(*_: object, **__: object) -> None:
        raise StoreFull("the server is at its memory limit", reason="memory")

    with monkeypatch.context() as patch:
        patch.setattr(TaskStore, "call", full)
        done = {one.code: one.done for one in repaired(owner, found)}
    assert done == {"orphaned-entries": False, "name-without-task": True}


@pytest.mark.parametrize("count", [2, 3, 4, 10])
@pytest.mark.parametrize("joined", [True, False])
def test_groups_whose_facts_are_lost_are_no_orphans(
    owner: Client, namespace: str, pages: Callable[..., None], count: int, *, joined: bool
) -> None:
    pages(orphans=3)
    with ExperienceStream(owner, "math", namespace=namespace) as stream:
        if joined:
            stream.join_group()
        stream.put_many([[numbered(number)] for number in range(count)])
        owner.execute("DEL", key(stream, "puts"), key(stream, "facts"))
        [refused] = repaired(owner, checked(owner, namespace))
        assert not refused.done
        assert "redrb rm TASK" in refused.summary
        assert owner.execute("XLEN", stream._task.store.keys.stream) == count
        if joined:  # running trainers lose nothing: what they give back waits again
            stream.take(count, timeout=5).release()
            assert numbers(stream.take(count, timeout=5)) == list(range(count))


@pytest.mark.parametrize("last", ["2", "x", "1.5", "9" * 28, "900", None])
def test_a_wrong_last_id_is_rebuilt(
    owner: Client, namespace: str, stream: ExperienceStream, last: str | None
) -> None:
    stream.put_many([[numbered(number)] for number in range(7)])
    stream.take(1, timeout=5).ack()
    before = stream.stats().ledger
    if last is None:
        owner.execute("HDEL", key(stream, "puts"), "last")
    else:
        owner.execute("HSET", key(stream, "puts"), "last", last)
    with pytest.raises(StoreError, match=r"redrb doctor \w+ --repair"):
        ExperienceStream(owner, "math", namespace=namespace)
    [mended] = repaired(owner, checked(owner, namespace))
    assert (mended.code, mended.done) == ("lost-puts", True)
    assert stream.stats().ledger == before
    stream.put(numbered(7))
    assert numbers(stream.take(7, timeout=5)) == list(range(1, 8))
    audit(stream)


@pytest.mark.parametrize("lost", [("task",), ("task", "puts"), ("task", "groups")])
@pytest.mark.parametrize("order", ["fifo", "stalest"])
def test_lost_settings_are_given_again_and_no_group_is_deleted(
    owner: Client, namespace: str, lost: tuple[str, ...], order: Any
) -> None:
    declared: dict[str, Any] = {"order": order, "tags": ["level"], "lease_ms": LEASE_MS}
    with ExperienceStream(owner, "math", namespace=namespace, **declared) as stream:
        stream.join_group()
        for number in range(6):
            stream.put(numbered(number), policy_version=9 - number, tags={"level": number})
        owner.execute("DEL", *(key(stream, name) for name in lost))
        with pytest.raises(StoreError, match=r"redrb doctor \w+ --repair"):
            stream.put(numbered(6), timeout=1)
        with pytest.raises(StoreError, match="redrb doctor math --repair"):
            task_stats(owner, "math", namespace=namespace, group="default")
        assert owner.execute("XLEN", stream._task.store.keys.stream) == 6
        for task in ("", "math"):
            found = Checkup(owner, namespace, StateReader(owner, namespace).look, task)
            assert "lost-settings" in codes(found)
            assert "name-without-task" not in codes(found)
        assert all(one.done for one in repaired(owner, found))
    with ExperienceStream(owner, "math", namespace=namespace, **declared) as again:
        expected = list(range(6)) if order == "fifo" else list(range(5, -1, -1))
        assert again.count(where={"level_gt": 2}) == 3
        lease = again.take(6, timeout=5)
        assert numbers(lease) == expected
        lease.ack()
        again.put(numbered(6), policy_version=1)
        audit(again)


def test_consumer_groups_whose_names_are_lost_lose_nothing(
    owner: Client, namespace: str, stream: ExperienceStream
) -> None:
    with ExperienceStream(owner, "math", namespace=namespace, group="late") as late:
        late.join_group()
        stream.put_many([[numbered(number)] for number in range(3)])
        owner.execute("DEL", key(stream, "groups"))
        stream.put(numbered(3))
        stream.take(4, timeout=5).ack()
        assert numbers(late.take(4, timeout=5)) == [0, 1, 2, 3]
        assert owner.execute("SCARD", key(stream, "groups")) == 2
        audit(stream)
