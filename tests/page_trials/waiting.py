"""Trials of pages of waiting takes, of rights, of groups in parts and of announced processes."""

from __future__ import annotations

import subprocess
import sys

import msgpack

from redrb import ExperienceStream
from redrb.gateway.store import SessionStore
from redrb.lua.pages import PAGES
from redrb.processes import process_name
from redrb.stream import SessionStats
from redrb.stream.admission.calls import Admit, BeatMaker
from redrb.stream.take.calls import Leave, Take, TakeRequest
from redrb.stream.task.calls import Announce
from tests.page_trials.bench import FOREVER_MS, LONG, Bench, put, until
from tests.samples import numbered

RIGHTS = {"max_staleness": 0, "groups_per_version": 1000}


def takes_woken(bench: Bench, count: int) -> None:
    """Takes wait; as many groups come: each take gets one, and none looks before it is woken."""
    stream = bench.filled(0)
    waiters = [f"w/{number}" for number in range(count)]
    assert [bench.queue(waiter) for waiter in waiters] == [0] * count
    put(stream, count)
    left = list(waiters)

    def is_over() -> bool:
        woken = [waiter for waiter in left if bench.is_woken(waiter)]
        assert woken or not left, f"nobody wakes {left}"
        for waiter in woken:
            left.remove(waiter)
            assert len(stream_take(bench, stream, waiter)) == 1
        return not left

    until(is_over)
    assert bench.size("queue", "default") == 0
    assert stream.stats().ledger.leased == count
    bench.run(Leave("default", "other"))


def stream_take(bench: Bench, stream: ExperienceStream, waiter: str) -> list[bytes]:
    """Take a group as a waiter that was woken; returns the ids."""
    revision = bench.client.execute("HGET", bench.key("task"), "revision").decode()
    number = waiter.partition("/")[2]
    asked = ("default", "other", f"other/{number}", "1", TakeRequest(1, 1), waiter)
    reply = bench.run(Take(*asked, 0, FOREVER_MS, revision))
    assert (reply.outcome, reply.amount) == ("taken", 1), f"{waiter} finds {reply.outcome}"
    stream_key = bench.key("stream")
    found = bench.client.execute("XPENDING", stream_key, "default", "-", "+", 9, f"other/{number}")
    return [entry[0] for entry in found]


def dead_takes_dropped(bench: Bench, count: int) -> None:
    """Takes that died in the queue leave it, and keep no group from the one behind them."""
    stream = bench.filled(0)
    for number in range(count):
        bench.queue(f"dead/{number}")
        needs = (bench.key("needs", "default"), f"dead/{number}", "1 1 0")
        bench.client.execute("HSET", *needs)
    bench.queue("living/1")
    put(stream, 1)
    until(lambda: bench.queue("living/1", need=2) == 1 and bench.size("queue", "default") == 1)
    assert len(stream_take(bench, stream, "living/1")) == 1
    bench.run(Leave("default", "other"))


def queries_woken(bench: Bench, count: int) -> None:
    """Takes with different queries wait: each finds its group, and no query is left behind."""
    stream = bench.open(tags=["kind"])
    stream.join_group()
    queries = [stream._query({"kind": number}) for number in range(count)]
    for number, query in enumerate(queries):
        assert bench.queue(f"w/{number}", query, need=2) == 0
    for number in range(count):
        put(stream, 1, first=number, tags={"kind": number})
    for number, query in enumerate(queries):
        assert bench.queue(f"w/{number}", query, need=2) == 1
        bench.queue(f"w/{number}", query, need=2, ttl_ms=0)
    assert bench.size("queries", "default") == 0


def woken_at_the_end(bench: Bench, count: int) -> None:
    """Of takes whose task is deleted, a page is woken; the others look again by themselves."""
    stream = bench.filled(0)
    waiters = [f"w/{number}" for number in range(count)]
    for waiter in waiters:
        bench.queue(waiter)
    stream.clear()
    assert bench.size("queue", "default") == bench.size("needs", "default") == 0
    woken = [waiter for waiter in waiters if bench.is_woken(waiter)]
    assert len(woken) == min(count, PAGES["woken_at_end"] - 3)  # three empty queues come first
    assert bench.client.execute("KEYS", bench.key("*")) == [bench.key("removed").encode()]


def dead_makers(bench: Bench, count: int) -> None:
    """Rights of makers that died return, whatever the number of makers."""
    _rights_return(bench, [1] * count)


def dead_maker(bench: Bench, count: int) -> None:
    """Rights of one maker that died return, whatever their number."""
    _rights_return(bench, [count])


def _rights_return(bench: Bench, rights: list[int]) -> None:
    stream = bench.filled(0, **RIGHTS)
    for number, amount in enumerate(rights):
        admit(bench, stream, f"maker-{number}", amount)
    for number in range(len(rights)):
        bench.client.execute("ZADD", bench.key("makers"), "XX", 1, f"maker-{number}")
    _reclaim(bench, stream, sum(rights), living=1)


def ended_makers(bench: Bench, count: int) -> None:
    """Makers whose processes have ended on this machine are found, a page at each beat."""
    stream = bench.filled(0, **RIGHTS)
    host, _, place = process_name().rsplit("-", 2)
    with subprocess.Popen([sys.executable, "-S", "-c", ""]) as ended:
        pass
    late = int(bench.client.execute("TIME")[0]) * 1000 + 5_000
    for number in range(count):
        maker = f"{host}-{ended.pid}-{place}{number}"
        admit(bench, stream, maker, 1)
        bench.client.execute("ZADD", bench.key("makers"), "XX", late, maker)

    def is_over() -> bool:
        makers = bench.run(BeatMaker("other", 30_000, stream.incarnation)).makers
        assert len(makers) <= PAGES["late"]
        stream._admitter.maker.end_dead(makers)
        return bench.size("makers") == 1

    until(is_over)
    rights = stream.stats().admission
    assert (rights.lost, rights.held, rights.balanced) == (count, 0, True)


def held_too_long(bench: Bench, count: int) -> None:
    """Rights return that a living maker has held for too long."""
    stream = bench.filled(0, **RIGHTS)
    admit(bench, stream, "slow", count)
    for right in range(1, count + 1):
        bench.client.execute("ZADD", bench.key("holds"), "XX", 1, right)
    _reclaim(bench, stream, count, living=2)


def admit(bench: Bench, stream: ExperienceStream, maker: str, amount: int) -> list[int]:
    asked = (f"{maker}/1", amount, amount, 0, FOREVER_MS, FOREVER_MS, stream.incarnation, "series")
    reply = bench.run(Admit(*asked))
    assert (reply.outcome, len(reply.numbers)) == ("granted", amount)
    return sorted(reply.numbers)


def _reclaim(bench: Bench, stream: ExperienceStream, expected: int, *, living: int) -> None:
    lost = []

    def is_over() -> bool:
        beat = BeatMaker("other", FOREVER_MS, stream.incarnation)
        lost.append(bench.run(beat).taken_back)
        return sum(lost) == expected and bench.size("makers") == living

    until(is_over)
    rights = stream.stats().admission
    assert (rights.lost, rights.held, rights.balanced) == (expected, 0, True)


def rights_returned(bench: Bench, count: int) -> None:
    """A maker that ends returns all its rights."""
    stream = bench.filled(0, **RIGHTS)
    given = stream.admit(count, timeout=0)
    assert given.count == count
    stream.close()
    rights = bench.open(**RIGHTS).stats().admission
    assert (rights.returned, rights.held) == (count, 0)


def rights_used(bench: Bench, count: int) -> None:
    """A put uses a right for each group, and returns those of the groups that were dropped."""
    stream = bench.open(filters=[lambda group: group[0].reward > 0], **RIGHTS)
    stream.join_group()
    stream.advance(1)
    with stream.admit(count + 1, timeout=0) as admission:
        put(stream, count + 1, admission=admission, policy_version=1)
    rights = stream.stats().admission
    assert (rights.used, rights.returned, rights.held) == (count, 1, 0)


def makers_reported(bench: Bench, count: int) -> None:
    """The report names a page of makers, and counts the rights of all."""
    stream = bench.filled(0, **RIGHTS)
    for number in range(count):
        admit(bench, stream, f"maker-{number}", 1)
    rights = stream.stats().admission
    assert (rights.held, len(rights.makers)) == (count, min(count, 3))


def parts_dropped(bench: Bench, count: int) -> None:
    """Unfinished groups whose age limit is over go, each once, and one that is whole is found."""
    stream = bench.filled(0)
    for number in range(count + 1):
        stream.put_part(f"k{number:03}", numbered(number), index=0, of=1 + (number < count))
    stream.put_part("whole", numbered(1), index=0, of=2, least=1)
    for number in range(count):
        _make_old(bench, f"k{number:03}")
    _make_old(bench, "whole")
    until(lambda: stream._consumer.beat() or bench.size("part_due") == 0)
    found = stream.stats().parts
    assert (found.dropped, found.waiting, found.balanced) == (count, 0, True)
    assert stream.count() == 2


def _make_old(bench: Bench, name: str) -> None:
    records = bench.key("part_records")
    record = msgpack.unpackb(bench.client.execute("HGET", records, name))
    bench.client.execute("HSET", records, name, msgpack.packb(record | {"ends": 1}))
    bench.client.execute("ZADD", bench.key("part_due"), "XX", 1, name)


def part_ends_bounded(bench: Bench, count: int) -> None:
    """No more ends are remembered than the page says."""
    bench.pages(part_ends_forgotten=1)
    stream = bench.filled(0)
    for number in range(count):
        stream.put_part(f"k{number}", numbered(number), index=0, of=1)
    assert bench.size("part_ended") == bench.size("part_ends") == min(count, 3)


def part_ends_forgotten(bench: Bench, count: int) -> None:
    """Ends that are old are forgotten by the ends that follow."""
    stream = bench.filled(0)
    for number in range(count):
        stream.put_part(f"k{number}", numbered(number), index=0, of=1)
        bench.client.execute("ZADD", bench.key("part_ended"), "XX", 1, f"k{number}")
    ended = []

    def is_over() -> bool:
        ended.append(stream.put_part(f"new{len(ended)}", numbered(1), index=0, of=1))
        return bench.size("part_ended") == len(ended)

    until(is_over)
    assert bench.size("part_ends") == len(ended)


def sessions_forgotten(bench: Bench, count: int) -> None:
    """Sessions that have expired are forgotten by those that begin, and not counted before."""
    stream = bench.filled(0)
    with SessionStore(bench.open(), timeout_s=600) as store:
        for number in range(count):
            store.open("p", size=1, wait_s=0)
            assert stream.stats().sessions.open == number + 1
        for name in bench.client.execute("ZRANGE", bench.key("sessions"), 0, -1):
            bench.client.execute("ZADD", bench.key("sessions"), "XX", 1, name)
        assert stream.stats().sessions == SessionStats(begun=count)
        opened = []

        def is_over() -> bool:
            opened.append(store.open("p", size=1, wait_s=0))
            assert stream.stats().sessions.open == len(opened)
            return bench.size("sessions") == len(opened)

        until(is_over)


def records_removed(bench: Bench, count: int) -> None:
    """Records of producers that put nothing for two epochs go; the others stay."""
    stream = bench.filled(1)
    puts = bench.key("puts")
    for number in range(count):
        bench.client.execute("HSET", puts, f"old{number}{LONG}", "1 1 1 0")
    bench.client.execute("HSET", puts, "epoch", 2, f"new{LONG}", "1 1 1 2")
    fields = bench.size("puts")
    bench.client.execute("HSET", bench.key("task"), "epoch_ms", 1)
    until(
        lambda: (
            bench.beat(stream) or not bench.client.execute("HEXISTS", bench.key("task"), "epoch_at")
        )
    )
    assert bench.client.execute("HEXISTS", puts, f"new{LONG}")
    assert bench.size("puts") == fields - count - 1  # the stream's own record is of epoch 0


def announcements_removed(bench: Bench, count: int) -> None:
    """Workers that fell silent long ago are forgotten."""
    stream = bench.filled(0)
    for number in range(count):
        bench.client.execute("ZADD", bench.key("workers"), 1, f"w{number}")
        bench.client.execute("HSET", bench.key("announcements"), f"w{number}", "0 ")
    announcement = stream._consumer.worker.announcement()

    def is_over() -> bool:
        bench.run(Announce("living", ended=False), announcement)
        return bench.size("workers") == 1

    until(is_over)
    assert bench.size("announcements") == 1
