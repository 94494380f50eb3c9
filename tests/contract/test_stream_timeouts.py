"""Calls whose time is up: they end in time, and the error of a take counts where every group is."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import pytest
import torch

from redrb import BatchTimeout, ExperienceStream, Mixture, ShardedStream, Status, Table
from redrb.connection import deadline
from redrb.connection.deadline import Deadline, here
from redrb.connection.stop import Stop
from redrb.errors import AdmissionTimeout, StoreError, StoreFull, StoreUnavailable
from redrb.experience import BufferItem
from redrb.stream.sharded.sharded import _Batch
from redrb.stream.take.calls import TakeRequest
from redrb.stream.task.store import TaskStore
from tests.samples import numbered

FATES = {
    "available", "unmatched", "other_status", "leased_here", "leased_elsewhere", "acked", "expired",
    "filtered", "evicted", "dead",
}  # fmt: skip


def refused(stream: ExperienceStream, count: int = 4, **options: object) -> BatchTimeout:
    with pytest.raises(BatchTimeout) as caught:
        stream.take(count, timeout=0, **options)
    error = caught.value
    assert error.fates["put"] == sum(error.fates.get(name, 0) for name in FATES)
    return error


def odd(group: Sequence[BufferItem]) -> bool:
    return int(group[0].reward) % 2 == 1


def test_a_take_says_what_makers_do_that_have_rights_or_old_weights(client, namespace):
    options = {"namespace": namespace, "max_staleness": 1, "groups_per_version": 4}
    with (
        ExperienceStream(client, "math", **options) as making,
        ExperienceStream(client, "math", **options) as training,
    ):
        training.join_group()
        training.advance(1)
        with making.admit(1) as right:
            error = str(refused(training))
            assert "Makers hold 1 right to begin groups, and have put nothing yet" in error
            training.advance(4)
            making.put(numbered(1, policy_version=1), admission=right)
        for count in (1, 3):
            error = str(refused(training))
            assert f"Of {count} group" in error
            assert "on arrival has version 1, and the newest version is 4: do makers load" in error
            making.put_many([[numbered(each, policy_version=1)] for each in range(3 - count)])
        with ExperienceStream(client, "math", group="late", **options) as late:
            assert "; 3 were put before, of which 3 expired as too stale." in str(refused(late))


def test_a_take_says_that_groups_wait_for_parts(client, namespace):
    with ExperienceStream(client, "math", namespace=namespace) as stream:
        stream.put_part("a", numbered(1), index=0, of=2)
        error = refused(stream, 1)
        assert "1 group waits for parts that nobody has put yet" in str(error)
        assert error.fates["parts_waiting"] == 1
        stream.put_part("a", numbered(2), index=1, of=2)
        assert "parts_waiting" not in refused(stream, 2).fates
        stream.take(1, timeout=0).ack()


def test_a_full_task_says_which_consumer_group_holds_its_groups(client, namespace):
    with (
        ExperienceStream(client, "math", namespace=namespace, limit=2) as stream,
        ExperienceStream(client, "math", namespace=namespace, group="critic") as critic,
        ThreadPoolExecutor() as pool,
    ):
        stream.put_many([[numbered(1)], [numbered(2)]])
        with pytest.raises(StoreFull, match="full and nothing made room: no consumer group has"):
            stream.put(numbered(3), timeout=0)
        lease = stream.take(2, timeout=0)
        with pytest.raises(StoreFull, match=r"group 'default' 0 groups wait and 2 are leased\. Tr"):
            stream.put(numbered(3), timeout=0)
        critic.join_group()
        lease.ack()
        waits = "of consumer group 'critic' 2 groups wait and 0 are leased; of consumer group 'def"
        with pytest.raises(StoreFull, match=f"{waits}.* room when all have acknowledged it"):
            stream.put(numbered(3), timeout=0)
        waiting = pool.submit(stream.put, numbered(3), timeout=30)
        until = time.monotonic() + 20
        while not (error := refused(stream, 1)).blocked and time.monotonic() < until:
            pass
        assert "that another consumer group has not acknowledged" in str(error)
        critic.take(2, timeout=0).ack()
        waiting.result()
        stream.take(1, timeout=5).reject("broken")
        late = ExperienceStream(client, "math", namespace=namespace, group="late")
        critic.take(1, timeout=0).ack()
        with late:
            error = str(refused(late, 1))
            assert "A consumer group gets what is put after it has joined" in error


def test_every_fate_is_counted(client, namespace):
    options = {"namespace": namespace, "max_staleness": 3, "tags": ["level"], "max_deliveries": 1}
    stream = ExperienceStream(client, "math", filters=[odd], **options)
    other = ExperienceStream(client, "math", **options)
    with stream, other:
        stream.put(numbered(2, policy_version=9))
        late = str(refused(stream))
        assert "since this consumer group joined; 1 was put before, of which 1 was" in late
        assert "check the filters" in late
        stream.put(numbered(4, policy_version=9))
        assert "Of 1 group put: 1 was filtered at put. Filters drop" in str(refused(stream))
        stream.put_many([[numbered(n, policy_version=9)] for n in (1, 3, 5, 7, 9, 11)])
        mine = stream.take(3, timeout=0)
        stream.take(1, timeout=0).ack()
        theirs = other.take(1, timeout=0)
        stream.take(1, timeout=0).reject("broken")
        stream.put(numbered(13, policy_version=9, tags={"level": 1}))
        stream.put(numbered(15, policy_version=9, status=Status.ABORTED))
        stream.put(numbered(17, policy_version=1))
        stream.advance(9)
        error = refused(stream, where={"level": 2})
        assert error.fates == {
            "put_ever": 11, "filtered_ever": 2, "expired_ever": 0, "put": 10, "available": 0,
            "unmatched": 1, "other_status": 1,
            "leased_here": 3, "leased_elsewhere": 1, "acked": 1, "expired": 1, "filtered": 1,
            "evicted": 0, "dead": 1,
        }  # fmt: skip
        for part in (
            "1 does not match the query, 1 has another status, 3 are leased by this consumer",
            "1 is leased by other consumers, 1 is acknowledged, 1 expired as too stale",
            "1 was filtered at put, 1 is in the dead letters.",
        ):
            assert part in str(error)
        assert "release the leases of this consumer" in str(refused(stream, 3))
        mine.release([mine.ids[0]])
        assert refused(stream).fates["leased_here"] == 2
        mine.ack()
        assert refused(stream).fates["leased_here"] == 0
        theirs.release()
        assert refused(other).fates["available"] == 3


def test_a_batch_that_one_request_acknowledges_is_no_longer_leased(client, namespace):
    with ExperienceStream(client, "math", namespace=namespace) as stream:
        stream.put_many([[numbered(n)] for n in range(3)])
        first = stream.take(1, timeout=0)
        second = stream.take(2, timeout=0, ack=first)
        assert refused(stream).fates["leased_here"] == 2
        second.ack()
        assert "3 are acknowledged" in str(refused(stream))


def test_a_take_says_that_makers_wait_for_rights_and_why(client, namespace):
    with (
        ExperienceStream(client, "math", namespace=namespace, max_staleness=1) as stream,
        ThreadPoolExecutor() as pool,
    ):
        stream.advance(1)
        kept = []  # rights that nobody refers to return

        def admitted(wait):
            """Return the error of a take while a maker waits for two rights."""
            making = pool.submit(stream.admit, 2, timeout=30)
            deadline = time.monotonic() + 20
            while wait not in (error := str(refused(stream))) and time.monotonic() < deadline:
                pass
            stream.expect(1 if "nobody has said" in wait else 4)
            kept.append(making.result())
            return error

        assert "stream.expect(groups)" in admitted(
            "1 maker waits for the right to begin groups: nobody has said"
        )
        assert stream.settings().values["groups_per_version"] == "1"
        assert "raise max_staleness" in admitted("as many are begun and not yet trained")
        assert stream.settings().values["groups_per_version"] == "4"


@pytest.mark.parametrize(
    "waits", ["take", "put", "admit", "rows", "take of shards", "put into shards", "turn of shards"]
)
def test_the_log_of_a_long_wait_says_what_to_look_at(client, namespace, monkeypatch, caplog, waits):
    monkeypatch.setattr(deadline, "WARN_EVERY_S", 0.0)
    if waits == "rows":
        table = Table(client, "train", namespace=namespace, limit=1)
        table.put(["a"], {"x": torch.arange(1)})
        with suppress(StoreFull):
            table.put(["b"], {"x": torch.arange(1)}, timeout=0.1)
    elif "shards" in waits:
        options = {"shards": 3, "limit": 2, "namespace": namespace}
        with ShardedStream(client, "math", **options) as stream, suppress(TimeoutError, StoreFull):
            if "put" in waits:
                stream.put_many([[numbered(each)] for each in range(40)], timeout=1.0)
            if "turn" in waits:
                held = stream._await_turn(_Batch(TakeRequest(1, 1, Status.COMPLETED, "")))
            stream.take(2, timeout=1.0)
        if "turn" in waits:
            assert held.leases
            assert "a take waits for its turn" in caplog.text
    else:
        options = {"max_staleness": 0, "groups_per_version": 1} if waits == "admit" else {}
        options |= {"limit": 4}
        with ExperienceStream(client, "math", namespace=namespace, **options) as stream:
            stream.join_group()
            with suppress(TimeoutError, StoreFull):
                if waits == "admit":
                    with stream.admit(1):
                        stream.admit(1, timeout=0.1)
                elif "put" in waits:
                    stream.put_many([[numbered(each)] for each in range(40)], timeout=0.1)
                else:
                    stream.take(2, timeout=0.1)
    [said, *_] = [each for each in caplog.messages if "s now" in each]
    assert said.endswith(f"s now; `redrb doctor --namespace {namespace}` says why")
    assert "producer" not in said


def test_an_unused_task_is_named_with_similar_ones(client, namespace):
    for task in ("math", "Math2", "code"):
        with ExperienceStream(client, task, namespace=namespace) as stream:
            stream.put(numbered(1))
    for foreign in (b"math\xff", b"math 2", b"math:"):  # keys that redrb does not write
        client.execute("HSET", b"redrb:{%b:%b}:puts" % (namespace.encode(), foreign), "put", 1)
    with (
        ExperienceStream(client, "maht", namespace=namespace) as unused,
        ExperienceStream(client, "mathe", namespace=namespace) as late,  # also without groups
    ):
        error = refused(unused)
        assert error.similar == ("math", "Math2", "code")
        assert "Nobody has ever put into this task" in str(error)
        assert "groups: 'math', 'Math2', 'code'." in str(error)
        late.put(numbered(1))
        assert refused(late).similar == ()
        with ExperienceStream(client, "mathe", namespace=namespace, group="new") as joined:
            joined.join_group(start="newest")
            assert "since this consumer group joined" in str(refused(joined))


def test_a_look_at_an_unused_task_searches_once(client, namespace, monkeypatch):
    with ExperienceStream(client, "math", namespace=namespace) as stream:
        refused(stream)
        searched = stream._task._similar
        refused(stream)
        assert stream._task._similar is searched


def put_many(stream: ExperienceStream, groups: int) -> None:
    stream.put_many([[numbered(n)] for n in range(groups)])


def take_of_a_rank(stream: ExperienceStream) -> object:
    return stream.take(4, timeout=0, rank=0, world_size=1, step=0)


def join_at_once(stream: ExperienceStream) -> object:
    with Deadline(at_most=0.0):
        return stream.join_group()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda stream: stream.take(600, timeout=0), BatchTimeout, "take again, which goes on"),
        (take_of_a_rank, BatchTimeout, "take again, which goes on"),
        (join_at_once, StoreUnavailable, "the next call goes on"),
    ],
)
def test_a_call_whose_group_joins_keeps_its_timeout_and_the_next_one_goes_on(
    client, namespace, monkeypatch, call, error, message
):
    monkeypatch.setattr(deadline, "PAGES_S", 0.0)
    stream = ExperienceStream(client, "math", namespace=namespace)
    later = ExperienceStream(client, "math", namespace=namespace, group="later")
    with stream, later:
        put_many(stream, 600)  # facts are read in pages of about 100
        cut_off: list[str] = []
        done = False
        while not done:
            try:
                call(later)
                done = True
            except error as each:
                cut_off.append(str(each))
        assert 1 <= len(cut_off) <= 600 // 50
        assert all(message in each for each in cut_off)


def test_a_take_of_shards_whose_groups_join_keeps_its_timeout_and_the_next_one_goes_on(
    client, namespace, monkeypatch
):
    monkeypatch.setattr(deadline, "PAGES_S", 0.0)
    place: dict[str, Any] = {"shards": 2, "namespace": namespace}
    stream, later = (ShardedStream(client, "math", **place, group=name) for name in "ab")
    with stream, later:
        for shard in stream.shards.values():
            put_many(shard, 600)  # facts are read in pages of about 100
        cut_off, lease = 0, None
        while lease is None:
            try:
                lease = later.take(1200, timeout=0)
            except BatchTimeout:
                cut_off += 1
        assert 1 <= cut_off <= 2 * 600 // 50


CALLS: dict[str, Callable[[ExperienceStream], object]] = {
    "put": lambda stream: stream.put([numbered(2, policy_version=0)]),
    "take": lambda stream: stream.take(1),
    "put_part": lambda stream: stream.put_part("a", numbered(1, policy_version=0), index=0, of=2),
    "admit": lambda stream: stream.admit(1),
    "rank": lambda stream: stream.take(1, rank=0, world_size=1, step=0),
    "leases": lambda stream: next(stream.leases(1)),
}


@pytest.mark.parametrize("damaged", ["", "x"])
@pytest.mark.parametrize("call", CALLS)
def test_a_task_whose_scripts_refuse_it_is_an_error_and_no_endless_loop(
    client, namespace, call, damaged
):
    settings: dict[str, Any] = {"max_staleness": 4, "groups_per_version": 4}
    with ExperienceStream(client, "math", namespace=namespace, **settings) as stream:
        stream.put([numbered(1, policy_version=0)])
        store = TaskStore.of(client, namespace, "math")
        client.execute("HSET", store.keys.task, "rules", damaged)
        with pytest.raises(StoreError, match="redrb set"):
            CALLS[call](stream)
        stream.configure(limit=99)
        stream.put([numbered(3, policy_version=0)])
        CALLS[call](stream)


@pytest.mark.parametrize("call", ["put", "take"])
def test_shards_whose_scripts_refuse_them_are_an_error_and_no_endless_loop(client, namespace, call):
    with ShardedStream(client, "math", shards=2, namespace=namespace) as stream:
        stream.put_many([[numbered(1)]])
        for name in stream.shards:
            store = TaskStore.of(client, namespace, name)
            client.execute("HSET", store.keys.task, "rules", "")
        with pytest.raises(StoreError, match="redrb set"):
            CALLS[call](stream)
        for shard in stream.shards.values():
            shard.configure(limit=99)
        stream.put_many([[numbered(3)]])
        CALLS[call](stream)


@pytest.mark.every_server
@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("put", StoreFull),
        ("take", BatchTimeout),
        ("rank", BatchTimeout),
        ("leases", BatchTimeout),
        ("admit", AdmissionTimeout),
        ("put into shards", StoreFull),
        ("take of shards", BatchTimeout),
    ],
)
def test_a_wait_ends_when_the_time_of_a_process_that_ends_is_up(
    client, namespace, monkeypatch, call, error
):
    monkeypatch.setattr(deadline, "LAST_REQUESTS_S", 5.0)  # enough on a machine that is busy, too
    settings: dict[str, Any] = {"limit": 2}
    if call == "admit":
        settings = {"max_staleness": 0, "groups_per_version": 1}
    stop = Stop(5.3)
    stream: Any = ExperienceStream(client, "math", namespace=namespace, **settings)
    if "shards" in call:
        stream = ShardedStream(client, "math", shards=3, namespace=namespace, limit=2)
    with stream:
        if call == "put":
            put_many(stream, 2)
        if call == "put into shards":
            stream.put_many([[numbered(number)] for number in range(6)])
        held = stream.admit(1) if call == "admit" else nullcontext()
        with held:
            stop.begin()
            began = time.monotonic()
            with Deadline(budget=stop), pytest.raises(error):
                CALLS[call.partition(" ")[0]](stream)
            assert time.monotonic() - began < 10


def test_errors_of_puts_and_takes_name_the_namespace(client, namespace):
    """The most frequent cause of a wait that never ends is a wrong one."""
    place: dict[str, Any] = {"namespace": namespace, "on_full": "error"}
    plain = ExperienceStream(client, "math", limit=1, **place)
    ranked = ExperienceStream(client, "ranked", **place)
    mixture = Mixture(client, {"math": 1, "code": 1}, namespace=namespace)
    takes: list[Callable[[], Any]] = [
        partial(plain.take, 2, at_least=1, timeout=0),
        partial(mixture.take, 2, timeout=0),
        partial(ranked.take, 2, rank=0, world_size=2, step=0, timeout=0),
    ]
    puts = [
        partial(plain.put_many, [[numbered(n)] for n in range(3)]),
        partial(plain.put_part, "b", numbered(1), index=0, of=2, most_parts=1),
    ]
    with plain, ranked, mixture:
        for take in takes:
            with pytest.raises(BatchTimeout, match=f" of namespace '{namespace}': 0 of") as timeout:
                take()
            assert timeout.value.namespace == namespace
        plain.put_part("a", numbered(1), index=0, of=2)
        for put in puts:
            with pytest.raises(StoreFull, match=f"of namespace '{namespace}'") as full:
                put()
            assert full.value.namespace == namespace


@pytest.mark.parametrize("call", ["put", "writer"])
def test_a_filter_and_the_encoding_take_none_of_the_time_of_a_put(client, namespace, call):
    left: list[float] = []

    def notes_time(_):
        left.append(here().waits_s)
        return True

    with ExperienceStream(client, "math", namespace=namespace, filters=[notes_time]) as stream:
        if call == "put":
            stream.put(numbered(1), timeout=5)
        else:
            with stream.writer() as writer:
                writer.put(numbered(1), timeout=5)
    assert left
    assert set(left) == {math.inf}
