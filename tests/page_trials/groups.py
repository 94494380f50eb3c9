"""Trials of pages by which groups expire, arrive, leave or change their place."""

from __future__ import annotations

import pytest

from redrb import BatchTimeout, ExperienceStream, Status
from redrb.stream.put import receiver
from redrb.stream.task.calls import Fill, Requeue
from redrb.stream.task.origin import Look
from redrb.watch.doctor.calls import RemoveOrphans
from tests.audit import audit
from tests.page_trials.bench import LONG, Bench, put, train, until
from tests.samples import numbers


def expired_by_takes(bench: Bench, count: int) -> None:
    """A take expires every group that is too stale, before it finds none."""
    _expire(bench, count, Status.COMPLETED, "discard")


def moved_by_expiry(bench: Bench, count: int) -> None:
    """The same where expired groups are kept: each waits in another status."""
    _expire(bench, count, Status.EXPIRED, "keep")


def _expire(bench: Bench, count: int, status: Status, on_expired: str) -> None:
    stream = bench.open(max_staleness=1, max_token_staleness=2, on_expired=on_expired)
    stream.join_group()
    put(stream, count, policy_version=0)
    stream.advance(5)
    with pytest.raises(BatchTimeout):
        stream.take(1, timeout=0)
    audit(stream)
    kept = count if status is Status.EXPIRED else 0
    ledger = stream.stats().ledger
    assert (ledger.expired, stream.count(status=status)) == (count - kept, kept)


def orphans_of_a_put(bench: Bench, count: int) -> None:
    """A put removes the entries that failed puts have left, and is stored once."""
    stream = bench.filled(1)
    _add_orphans(bench, count)
    put(stream, 1, first=1)
    train(stream, [0, 1])


def orphans_of_a_repair(bench: Bench, count: int) -> None:
    """The repair of `redrb doctor` removes them too, in as many calls as it needs."""
    stream = bench.filled(1)
    _add_orphans(bench, count)
    removed = []

    def is_over() -> bool:
        page = bench.run(RemoveOrphans())
        removed.append(page.found)
        return not page.more

    until(is_over)
    assert sum(removed) == count
    train(stream, [0])


def _add_orphans(bench: Bench, count: int) -> None:
    for _ in range(count):
        bench.client.execute("XADD", bench.key("stream"), "*", "g", b"of a failed put")


def evicted_behind_leased(bench: Bench, count: int) -> None:
    """A put at the limit evicts the oldest waiting group, which lies behind leased ones."""
    stream = bench.filled(count, limit=count + 2)
    held = stream.take(count, timeout=0)
    _evict_one(bench)
    held.ack()


def evicted_behind_gap(bench: Bench, count: int) -> None:
    """The same behind one leased group and a gap of groups that are gone."""
    stream = bench.filled(count + 1)
    held = stream.take(1, timeout=0)
    stream.take(count, timeout=0).ack()
    stream.configure(limit=3)
    _evict_one(bench)
    held.ack()


def _evict_one(bench: Bench) -> None:
    bench.patch.setattr("redrb.stream.put.room.EVICTION_ATTEMPTS", 2)
    stream = bench.open(on_full="drop_oldest")
    put(stream, 2, first=1000)
    put(stream, 1, first=1002, timeout=5)
    assert stream.stats().ledger.evicted == 1
    assert numbers(stream.take(2, timeout=0)) == [1001, 1002]


def sorted_again(bench: Bench, count: int) -> None:
    """All groups of a random order get new places; gaps lie between them."""
    stream = bench.filled(2 * count + 1, order="uniform")
    lease = stream.take(2 * count, timeout=0)
    lease.release(lease.ids[::2])
    lease.ack()
    _restart_places(bench, stream)


def _restart_places(bench: Bench, stream: ExperienceStream) -> None:
    """Let a put find no room after the clock; takes then give new places."""
    held = len(stream)
    bench.client.execute("HSET", bench.key("clock", "default"), "default", "1e12")
    put(stream, 1)
    assert bench.client.execute("HEXISTS", bench.key("task"), "unsorted")
    lease = stream.take(held + 1, timeout=0)
    assert len(set(lease.ids)) == held + 1
    assert not bench.client.execute("HEXISTS", bench.key("task"), "unsorted")


def sorted_beyond_a_gap(bench: Bench, count: int) -> None:
    """The same with one wide gap."""
    stream = bench.filled(count + 2, order="uniform")
    lease = stream.take(count + 2, timeout=0)
    ends = min(lease.ids), max(lease.ids)
    lease.release(ends)
    lease.ack()
    _restart_places(bench, stream)


def index_filled(bench: Bench, count: int) -> None:
    """A used task gets an index of versions: every group is in it."""
    stream = bench.open(tags=["text"])
    stream.join_group()
    put(stream, count, policy_version=1, tags={"text": LONG})
    stream.configure(max_staleness=5)
    assert bench.size("versions", "default") == count
    stream.advance(9)
    assert stream.expire() == count


def joined_late(bench: Bench, count: int) -> None:
    """A consumer group that joins finds every stored group once."""
    stream = bench.open(tags=["text"])
    stream.join_group()
    put(stream, count, tags={"text": LONG})
    other = bench.open(group="late")
    assert other.count() == count  # before it joins
    other.join_group()
    train(other, list(range(count)))
    assert other.stats().ledger.put == count
    train(stream, list(range(count)))


def counted_unjoined(bench: Bench, count: int) -> None:
    """The groups that a consumer group would find are counted once each."""
    stream = bench.open(tags=["text"])
    stream.join_group()
    put(stream, 2 * count, tags={"text": LONG})
    stream.take(count, timeout=0).ack()
    assert bench.open(group="late").count() == count


def consumer_group_removed(bench: Bench, count: int) -> None:
    """A consumer group that holds groups in every state is removed: the others keep theirs."""
    stream, other = bench.filled(3 * count), bench.open(group="other")
    other.join_group()
    other.take(count, timeout=0).reject("bad")
    other.take(count, timeout=0)
    stream.take(count, timeout=0).ack()
    other.drop_group()
    assert stream.stats().dead_letters == 0
    train(stream, list(range(count, 3 * count)))
    assert stream.stats().stored == 0


def letters_shed(bench: Bench, count: int) -> None:
    """A smaller `max_dead` is reached at once."""
    stream = bench.filled(count + 1)
    stream.take(count + 1, timeout=0).reject("bad")
    stream.configure(max_dead=1)
    assert [letter.id for letter in stream.dead_letters()] == [count + 1]


def letters_below_the_floor(bench: Bench, count: int) -> None:
    """All groups up to the floor are gone, but for those that are named: none is left out."""
    stream = bench.filled(count + 1)
    stream.take(count, timeout=0).reject("bad")

    def is_over() -> bool:
        state = bench.run(Look("1"))
        left = [letter.id for letter in stream.dead_letters() if letter.id <= state.floor]
        assert sorted(left) == sorted(map(int, state.kept))
        stream.drop_dead_letters(left)
        return not left and state.floor == count

    until(is_over)


def sources_forgotten(bench: Bench, count: int) -> None:
    """Records of forwarded groups go once their groups can never come back; each is stored once."""
    bench.patch.setattr(receiver, "LOOK_EVERY", 1)
    rollouts = bench.filled(count + 1)
    with bench.task("scored") as scored:
        prefix = scored._task.store.keys.prefix
        lease = rollouts.take(count, timeout=0)
        lease.forward(scored, lease.groups())
        stored = count

        def is_over() -> bool:
            nonlocal stored
            lease = rollouts.take(1, timeout=0)
            lease.forward(scored, lease.groups())
            put(rollouts, 1)
            stored += 1
            [origin] = bench.client.execute("HKEYS", f"{prefix}sources")
            records = bench.client.execute("HKEYS", f"{prefix}sources:{origin.decode()}")
            return min(map(int, records)) >= stored - 1

        until(is_over)
        assert scored.stats().ledger.put == stored


def matched(bench: Bench, count: int) -> None:
    """Queries of one and of several conditions find every match, counted and taken."""
    stream = bench.open(tags=["kind", "level"])
    stream.join_group()
    for kind in (0, 1):
        put(stream, count, first=kind * count, tags={"kind": kind, "level": kind + 1})
    assert stream.count(where={"kind": 1}) == count
    either = {"$or": [{"kind": 1}, {"level": 2}]}
    both = {"kind": 0, "level": 1}
    assert (stream.count(where=either), stream.count(where=both)) == (count, count)
    taken = stream.take(count, timeout=0, where=either)
    assert numbers(taken) == list(range(count, 2 * count))
    taken.ack()
    taken = stream.take(count, timeout=0, where=both)
    assert numbers(taken) == list(range(count))
    taken.ack()


def priorities_changed(bench: Bench, count: int) -> None:
    """All groups get another priority."""
    stream = bench.open(order="priority")
    stream.join_group()
    ids = put(stream, count, priority=1.0)
    assert stream.update_priority(ids, [float(seq) for seq in ids]) == count
    assert numbers(stream.take(count, timeout=0)) == list(range(count))[::-1]


def moved(bench: Bench, count: int) -> None:
    """All groups move to another status, and back."""
    stream = bench.filled(count)
    ids = list(range(1, count + 1))
    assert stream.move(ids, Status.ABORTED) == count
    assert stream.count(status=Status.ABORTED) == count
    assert stream.move(ids, Status.COMPLETED) == count
    train(stream, list(range(count)))


def requeued(bench: Bench, count: int) -> None:
    """All dead letters are requeued, once."""
    stream = bench.filled(count)
    stream.take(count, timeout=0).reject("bad")
    ids = [letter.id for letter in stream.dead_letters()]
    assert len(stream.requeue(ids)) == count
    assert len(stream.requeue(ids)) == 0
    train(stream, list(range(count)))


def letters_dropped(bench: Bench, count: int) -> None:
    """All dead letters are deleted, once."""
    stream = bench.filled(count)
    stream.take(count, timeout=0).reject("bad")
    ids = [letter.id for letter in stream.dead_letters()]
    assert stream.drop_dead_letters(ids) == count
    assert stream.stats().dead_letters == 0


def requeued_by_bytes(bench: Bench, count: int) -> None:
    """A call requeues letters up to a page of bytes; all of them wait again, each once."""
    stream, ids = _rejected(bench, count)

    def requeued() -> bool:
        page = bench.run(Requeue(stream.group, list(map(str, ids))))
        assert len(page.ids) <= 3
        return not page.more

    until(requeued)
    train(stream, list(range(count)))
    put(stream, 1)
    stream.take(1, timeout=0).reject("bad")
    [letter] = stream.dead_letters()
    assert len(stream.requeue([*ids, letter.id, letter.id])) == 1
    train(stream, [0])


def letters_shed_by_bytes(bench: Bench, count: int) -> None:
    """Of letters beyond a smaller `max_dead`, a call deletes some up to a page of bytes."""
    stream, _ = _rejected(bench, count + 1)
    bench.client.execute("HSET", bench.key("task"), "max_dead", 1)
    left = [count + 2]
    newest = put(stream, 1)
    stream.take(1, timeout=0).reject("bad")

    def shed() -> bool:
        left.append(stream.stats().dead_letters)
        assert left[-2] - left[-1] <= 4
        return not bench.run(Fill()).more

    until(shed)
    assert tuple(letter.id for letter in stream.dead_letters()) == newest
    assert bench.size("letters", stream.group) == bench.size("buried") == 1
    assert stream.stats().dead_dropped == count + 1


def _rejected(bench: Bench, count: int) -> tuple[ExperienceStream, list[int]]:
    """Return a stream whose groups are dead letters, their ids, and let a page have three."""
    stream = bench.filled(count)
    stream.take(count, timeout=0).reject("bad")
    [letter] = bench.client.execute("XRANGE", bench.key("dead"), "-", "+", "COUNT", 1)
    bench.pages(copied_bytes=5 * sum(map(len, letter[1][1::2])) // 2)
    return stream, [letter.id for letter in stream.dead_letters()]


def settled(bench: Bench, count: int) -> None:
    """All groups that a checkpoint has trained are acknowledged, once."""
    stream = bench.filled(count + 1)
    trained = dict.fromkeys(range(1, count + 1), 1)
    assert stream.settle(trained, incarnation=stream.incarnation) == count
    assert stream.settle(trained, incarnation=stream.incarnation) == 0
    train(stream, [count])


def expired_on_call(bench: Bench, count: int) -> None:
    """`expire` discards every stale group; with a function, each is given to it once."""
    stream = bench.open(max_staleness=1)
    stream.join_group()
    put(stream, count, policy_version=0)
    assert stream.expire(5) == count
    put(stream, count, policy_version=0)
    seen: list[int] = []
    assert stream.expire(5, on_expired=lambda group: seen.extend(numbers(group))) == count
    assert seen == list(range(count))


def put_in_chunks(bench: Bench, count: int) -> None:
    """A put of many groups is stored once, in order."""
    stream = bench.open()
    stream.join_group()
    assert put(stream, count) == tuple(range(1, count + 1))
    with stream.writer() as writer:
        writer.put_many(stream.take(count, timeout=0).groups())
    assert stream.count() == count


def evicted_for_a_put(bench: Bench, count: int) -> None:
    """A lowered limit is reached by the next put, which evicts all that is beyond."""
    stream = bench.filled(count, limit=1000, on_full="drop_oldest")
    stream.configure(limit=1)
    put(stream, 1, first=count, timeout=5)
    assert numbers(stream.take(1, timeout=0)) == [count]
    assert stream.stats().ledger.evicted == count
