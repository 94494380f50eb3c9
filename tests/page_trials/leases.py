"""Trials of pages by which leases come back: of consumers that close or die."""

from __future__ import annotations

from collections.abc import Sequence

import redrb
from redrb import ExperienceStream
from redrb.lua.pages import PAGES
from redrb.stream.take.calls import Drop
from tests.audit import audit, kill_consumer
from tests.page_trials.bench import Bench, is_acknowledged, put, train, until
from tests.samples import numbers


def _come_back(bench: Bench, stream: ExperienceStream, held: Sequence[redrb.Lease]) -> None:
    """Let every second old lease be acknowledged after the first page: each group counts once."""
    whole = {lease: numbers(lease) for lease in held}
    total = stream.stats().ledger
    bench.beat(stream)
    audit(stream)
    acknowledged = [lease for lease in held[::2] if is_acknowledged(lease)]
    bench.take_over(stream)
    audit(stream)
    left = [number for lease in held if lease not in acknowledged for number in whole[lease]]
    lease = stream.take(len(left), timeout=0) if left else None
    assert not any(map(is_acknowledged, held[1::2])), "a lease that came back is acknowledged"
    if lease is not None:
        assert sorted(numbers(lease)) == sorted(left)
        lease.ack()
    after = stream.stats().ledger
    assert after.acked - total.acked == sum(map(len, whole.values()))
    assert (after.leased, after.waiting) == (0, 0)


def dead_with_many_leases(bench: Bench, count: int) -> None:
    """A consumer dies that holds leases of one group each."""
    stream, dead = bench.filled(count), bench.open()
    held = [dead.take(1, timeout=0) for _ in range(count)]
    kill_consumer(dead)
    _come_back(bench, stream, held)


def dead_with_one_lease(bench: Bench, count: int) -> None:
    """A consumer dies that holds one lease of many groups."""
    stream, dead = bench.filled(count), bench.open()
    held = [dead.take(count, timeout=0)]
    kill_consumer(dead)
    _come_back(bench, stream, held)


def many_dead(bench: Bench, count: int) -> None:
    """Many consumers die, each with one lease."""
    stream = bench.filled(count)
    dead = [bench.open() for _ in range(count)]
    held = [each.take(1, timeout=0) for each in dead]
    for each in dead:
        kill_consumer(each)
    _come_back(bench, stream, held)
    assert bench.size("consumers", "default") == 1


def names_without_slots(bench: Bench, count: int) -> None:
    """Reads without takes have created names of a consumer that ends: a page of them goes."""
    stream, ended = bench.filled(1), bench.open()
    lease = ended.take(1, timeout=0)
    key, group = ended._task.store.keys.stream, ended._consumer.group
    for number in range(1, 1 + count):
        name = f"{ended._consumer.name}/{number}"
        bench.client.execute("XREADGROUP", "GROUP", group, name, "STREAMS", key, "0")
    lease.release()
    ended.close()
    left = len(bench.client.execute("XINFO", "CONSUMERS", key, group))
    assert left == max(0, count - PAGES["unnoted"])
    train(stream, [0])


def many_dead_without_leases(bench: Bench, count: int) -> None:
    """Consumers that died without a lease are forgotten, and do not hide those with one."""
    stream = bench.filled(count + 1)
    dead = [bench.open() for _ in range(count + 1)]
    for each in dead:
        lease = each.take(1, timeout=0)
        if each is not dead[-1]:
            lease.ack()
        kill_consumer(each)
    last = f"{dead[-1].consumer}"
    bench.client.execute("ZADD", bench.key("consumers", "default"), "XX", 2, last)
    bench.take_over(stream)
    train(stream, [count])


def closed_with_many_leases(bench: Bench, count: int) -> None:
    """A consumer closes that holds leases of one group each."""
    stream, closing = bench.filled(count), bench.open()
    held = [closing.take(1, timeout=0) for _ in range(count)]
    closing.close()
    audit(stream)
    train(stream, list(range(count)))
    assert not any(map(is_acknowledged, held))
    assert bench.size("slots", "default") == 1  # that of the stream that trained


def closed_with_one_lease(bench: Bench, count: int) -> None:
    """A consumer closes that holds one lease of many groups."""
    stream, closing = bench.filled(count), bench.open()
    held = closing.take(count, timeout=0)
    closing.close()
    train(stream, list(range(count)))
    assert not is_acknowledged(held)


def dismissed(bench: Bench, count: int) -> None:
    """Another consumer requeues what a dead one leased, in leases of two groups."""
    stream, dead = bench.filled(2 * count), bench.open()
    for _ in range(count):
        dead.take(2, timeout=0)
    kill_consumer(dead)
    assert stream.dismiss(dead.consumer) == 2 * count
    train(stream, list(range(2 * count)))


def buried_at_takeover(bench: Bench, count: int) -> None:
    """Groups of a dead consumer whose last delivery it was become dead letters, each once."""
    stream, dead = bench.filled(count, max_deliveries=1), bench.open()
    bench.pages(copied_bytes=3 * stream.stats().bytes_put // count)
    dead.take(count, timeout=0)
    kill_consumer(dead)
    bench.take_over(stream)
    assert sorted(letter.id for letter in stream.dead_letters()) == list(range(1, count + 1))
    train(stream, [])


def acknowledged(bench: Bench, count: int) -> None:
    """A lease of many groups ends in two halves, in a task with every index."""
    stream = bench.open(max_staleness=9, max_token_staleness=9, tags=["kind"], max_bytes=10**6)
    stream.join_group()
    stream.advance(1)
    put(stream, count, policy_version=1, tags={"kind": 1})
    lease = stream.take(count, timeout=0)
    lease.ack(lease.ids[: count // 2]) if count > 1 else None
    audit(stream)
    lease.ack()
    ledger = stream.stats().ledger
    assert (ledger.acked, stream.stats().stored, bench.size("facts")) == (count, 0, 0)


def released(bench: Bench, count: int) -> None:
    """Release, fail and reject end every group of a lease once."""
    stream = bench.filled(count, max_deliveries=9)
    stream.take(count, timeout=0).release()
    stream.take(count, timeout=0).fail("no reason")
    stream.take(count, timeout=0).reject("bad")
    ledger = stream.stats().ledger
    assert (ledger.dead, ledger.waiting, ledger.leased) == (count, 0, 0)


def rejected_at_last(bench: Bench, count: int) -> None:
    """All groups of a lease fail for the last time: each becomes a dead letter."""
    stream = bench.filled(count, max_deliveries=1)
    bench.pages(copied_bytes=3 * stream.stats().bytes_put // count)
    stream.take(count, timeout=0).fail("no reason")
    assert sorted(letter.id for letter in stream.dead_letters()) == list(range(1, count + 1))
    train(stream, [])


def needed_by_another(bench: Bench, count: int) -> None:
    """Groups that another consumer group leases stay, when the first one acknowledges all."""
    stream, other = bench.filled(2 * count), bench.open(group="other")
    other.join_group()
    held = other.take(2 * count, timeout=0)
    held.release(held.ids[::2])
    train(stream, list(range(2 * count)))
    assert stream.stats().stored == 2 * count
    held.ack()
    train(other, list(range(0, 2 * count, 2)))
    assert other.stats().stored == 0


def taken_and_lost(bench: Bench, count: int) -> None:
    """A take whose reply was lost is given up: its groups wait again."""
    stream = bench.filled(count)
    lease = stream.take(count, timeout=0)
    slot = lease.parts[0].holder
    until(lambda: not bench.run(Drop("default", slot.name, slot.token)).more)
    assert not is_acknowledged(lease)
    train(stream, list(range(count)))


def step_acknowledged(bench: Bench, count: int) -> None:
    """The step of a rank is acknowledged whole, and that of a dead one comes back whole."""
    stream, dead = bench.filled(2 * count), bench.open()
    dead.take(count, rank=0, world_size=1, step=0, timeout=5)
    again = bench.open()
    lease = again.take(count, rank=0, world_size=1, step=0, timeout=5)
    assert sorted(numbers(lease)) == list(range(count))
    lease.ack()
    train(stream, list(range(count, 2 * count)))
