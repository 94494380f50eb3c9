"""A task in partitions: puts, takes, limits and ledgers are those of the whole task."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import redrb
from redrb import BatchTimeout, ConfigError, ExperienceStream, Status, StoreFull
from redrb.connection import Client, deadline
from redrb.errors import DecodeError, LeaseLost, TaskMismatch
from redrb.stream.export import export_task
from redrb.stream.put.pending import PendingPut
from redrb.stream.put.producer import Producer
from redrb.stream.task.lookup import task_stats
from tests.audit import audit, kill_consumer
from tests.one_partition import each_partition
from tests.samples import numbered, numbers

Open = Callable[..., ExperienceStream]


@pytest.fixture
def open_parts(client: Client, namespace: str) -> Iterator[Open]:
    """Open a task with partitions several times; every partition is audited at the end."""
    opened: list[ExperienceStream] = []

    def open_it(partitions: int = 4, **settings: Any) -> ExperienceStream:
        opened.append(
            ExperienceStream(client, "math", namespace=namespace, partitions=partitions, **settings)
        )
        return opened[-1]

    yield open_it
    for partition in each_partition(opened[0]):
        audit(partition)
    for stream in opened:
        stream.close()


def put(stream: ExperienceStream, *group_numbers: int, **options: Any) -> list[int]:
    return [stream.put([numbered(number)], **options)[0] for number in group_numbers]


def test_puts_spread_and_a_take_collects_from_all_partitions(
    open_parts: Open, tmp_path: Path
) -> None:
    stream = open_parts()
    ids = put(stream, *range(12))
    assert len(set(ids)) == 12
    assert [partition.count() for partition in each_partition(stream)] == [3, 3, 3, 3]
    with stream.take(12, timeout=0) as lease:
        assert sorted(numbers(lease)) == list(range(12))
        assert set(lease.ids) == set(ids)
        assert [stored and stored.id for stored in stream.read(ids)] == ids
    assert stream.stats().ledger == redrb.Ledger(put=12, acked=12)
    client = stream._task.store.client
    seen = task_stats(client, "math", namespace=stream.namespace, group="default")
    assert seen == stream.stats()
    put(stream, 12, 13)
    exported = export_task(client, "math", tmp_path / "out", namespace=stream.namespace)
    assert exported.groups == 2


def test_groups_are_forwarded_into_another_number_of_partitions(open_parts: Open) -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "partitions.md").read_text()
    [example] = re.findall(r"<!-- a test runs this.*?```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {"redrb": redrb}
    exec(example, names)
    old = open_parts()
    put(old, *range(300))
    client = old._task.store.client
    with ExperienceStream(client, "new", namespace=old.namespace, partitions=3) as new:
        names["forward_all"](old, new)
        assert sorted(numbers(new.take(300, timeout=0))) == list(range(300))
        assert old.stats().ledger == redrb.Ledger(put=300, acked=300)
        new.clear()


def test_a_put_goes_to_the_least_full_partition_although_others_have_emptied_it(
    open_parts: Open,
) -> None:
    maker, other = open_parts(), open_parts()
    for _ in range(10):
        put(each_partition(maker)[2], 0)
    put(maker, *range(40))
    fill = [partition.count() for partition in each_partition(maker)]
    assert max(fill) - min(fill) <= 3, fill
    each_partition(other)[2].take(fill[2], timeout=0).ack()
    put(maker, *range(100))
    fill = [partition.count() for partition in each_partition(maker)]
    assert max(fill) - min(fill) <= 2, fill


def test_an_incomplete_batch_is_released(open_parts: Open) -> None:
    stream = open_parts()
    put(stream, *range(6))
    with pytest.raises(BatchTimeout) as caught:
        stream.take(7, timeout=0)
    assert (caught.value.available, caught.value.wanted) == (6, 7)
    with pytest.raises(BatchTimeout):
        stream.take(7, timeout=0.05)
    stats = stream.stats()
    assert (stats.ledger.waiting, stats.ledger.leased, stats.consumers_waiting) == (6, 0, 0)
    assert len(stream.take(7, at_least=5, timeout=0.05)) == 6


def test_a_take_waits_for_groups_of_any_partition(open_parts: Open) -> None:
    stream, maker = open_parts(), open_parts()
    put(each_partition(maker)[1], 0, 1)
    with ThreadPoolExecutor(1) as threads:
        taking = threads.submit(stream.take, 5, timeout=20)
        for number in range(2, 5):
            while stream.stats().consumers_waiting < 4:
                pass
            put(each_partition(maker)[3], number)
        lease = taking.result()
    assert sorted(numbers(lease)) == [0, 1, 2, 3, 4]
    assert stream.stats().consumers_waiting == 0


def test_two_takes_that_wait_do_not_hold_groups_that_the_other_one_needs(open_parts: Open) -> None:
    streams = [open_parts(), open_parts()]
    maker = open_parts()
    put(maker, *range(4))
    with ThreadPoolExecutor(2) as threads:
        takes = [threads.submit(stream.take, 6, timeout=20) for stream in streams]
        put(maker, 4, 5)
        while not any(take.done() for take in takes):
            pass
        put(maker, *range(6, 12))
        leases = [take.result() for take in takes]
    assert sorted(number for lease in leases for number in numbers(lease)) == list(range(12))


def test_the_ledger_is_exact_under_threads(open_parts: Open) -> None:
    stream = open_parts(3, limit=60)
    made, taken = 120, []
    lock = threading.Lock()

    def make(first: int) -> None:
        with stream.writer() as writer:
            for number in range(first, first + made // 3):
                writer.put([numbered(number)], timeout=30)

    def train() -> None:
        while True:
            try:
                lease = stream.take(6, timeout=1, at_least=1)
            except BatchTimeout:
                return
            with lock:
                taken.extend(numbers(lease))
            lease.ack()

    with ThreadPoolExecutor(5) as threads:
        jobs = [threads.submit(make, first) for first in range(0, made, made // 3)]
        jobs += [threads.submit(train) for _ in range(2)]
        for job in jobs:
            job.result()
    assert sorted(taken) == list(range(made))
    assert stream.stats().ledger == redrb.Ledger(put=made, acked=made)


def test_parts_of_a_dead_trainer_return(open_parts: Open) -> None:
    dead, alive = open_parts(), open_parts(lease_ms=300)
    put(alive, *range(8))
    lease = dead.take(8, timeout=0)
    for partition in each_partition(dead):
        kill_consumer(partition)
    other = alive.take(8, timeout=20)
    assert sorted(numbers(other)) == list(range(8))
    with pytest.raises(LeaseLost) as caught:
        lease.ack(lease.ids[:3])
    assert set(caught.value.ids) <= set(other.ids)
    other.ack()


def test_a_consumer_that_died_is_dismissed_in_all_partitions(open_parts: Open) -> None:
    dead, alive = open_parts(), open_parts()
    put(alive, *range(8))
    dead.take(8, timeout=0)
    assert alive.dismiss(dead.consumer) == 8
    alive.take(8, timeout=0).ack()


def test_limits_are_divided_and_a_put_finds_the_partition_that_has_room(open_parts: Open) -> None:
    stream = open_parts(4, limit=10, on_full="error")
    assert [partition.stats().limit for partition in each_partition(stream)] == [3, 3, 2, 2]
    assert stream.stats().limit == 10
    put(stream, *range(10))
    with pytest.raises(StoreFull):
        put(stream, 10)
    each_partition(stream)[3].take(1, timeout=0).ack()
    put(stream, 10)
    blocking = open_parts(4)
    with pytest.raises(StoreFull):
        blocking.put([numbered(0)], timeout=0.05)
    with pytest.raises(ConfigError, match="at most 10"):
        ExperienceStream(
            stream._task.store.client,
            "math",
            namespace=stream.namespace,
            partitions=4,
            limit=10,
        ).take(11)
    with pytest.raises(ConfigError, match="divided among 4 partitions"):
        open_parts(4, limit=3)


def test_puts_that_wait_for_room_are_woken_by_any_partition_in_their_order(
    open_parts: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadline, "SLICE_S", 60)  # none of them looks again by itself
    stream = open_parts(4, limit=4)
    put(stream, *range(4))
    with ThreadPoolExecutor(2) as threads:
        putting = []
        for number in range(2):
            putting.append(threads.submit(put, stream, 10 + number, timeout=2))
            while stream.stats().producers_waiting < 4 * (number + 1):
                pass
        for number, partition in enumerate((2, 0)):
            each_partition(stream)[partition].take(1, timeout=0).ack()
            (group,) = putting[number].result()
            assert group % 4 == partition
    assert stream.stats().producers_waiting == 0


def test_a_large_put_waits_for_room_for_each_of_its_groups(open_parts: Open) -> None:
    stream = open_parts(4, limit=8)
    taken: list[int] = []
    with ThreadPoolExecutor(1) as threads:
        putting = threads.submit(
            stream.put_many, [[numbered(number)] for number in range(36)], timeout=20
        )
        while len(taken) < 36:
            lease = stream.take(8, at_least=1, timeout=0.2)
            taken += numbers(lease)
            lease.ack()
        assert len(set(putting.result())) == 36
    assert sorted(taken) == list(range(36))
    with pytest.raises(StoreFull) as caught:
        stream.put_many([[numbered(number)] for number in range(12)], timeout=0)
    assert caught.value.stored == stream.count() == 8


def test_a_put_that_may_still_arrive_waits_in_its_partition(
    open_parts: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = open_parts(2, limit=2)
    put(stream, *range(2))
    attempts: list[Producer] = []
    finish = Producer.finish

    def break_first(producer: Producer, pending: PendingPut) -> Any:
        attempts.append(producer)
        if len(attempts) == 1:
            with pytest.raises(StoreFull):
                finish(producer, pending)
            pending.repeated = True
            raise StoreFull("full", task="math")
        return finish(producer, pending)

    monkeypatch.setattr(Producer, "finish", break_first)
    with ThreadPoolExecutor(1) as threads:
        putting = threads.submit(put, stream, 2, timeout=20)
        while stream.stats().producers_waiting < 1:
            pass
        first = next(one for one in each_partition(stream) if one._producer is attempts[0])
        first.take(1, timeout=0).ack()
        putting.result()
    assert attempts == [first._producer] * 2


def test_a_put_that_every_partition_refuses_though_it_has_room_waits_before_it_tries_again(
    open_parts: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it is at the memory limit of the server."""
    stream = open_parts(3)
    attempts: list[Producer] = []

    def refuse(producer: Producer, _pending: PendingPut) -> Any:
        attempts.append(producer)
        raise StoreFull("no memory", task="math")

    with monkeypatch.context() as patched, pytest.raises(StoreFull, match="no memory"):
        patched.setattr(Producer, "finish", refuse)
        put(stream, 0, timeout=0.2)
    assert len(attempts) == 1 + 2 * 3, "then each of them once, before and after the wait"
    put(stream, 0)


def test_many_groups_are_put_in_order_over_the_partitions(open_parts: Open) -> None:
    stream = open_parts(2)
    stream.join_group()
    ids = stream.put_many([[numbered(number)] for number in range(70)])
    read = stream.read(ids)
    assert [int(stored.items[0].reward) for stored in read if stored] == list(range(70))
    assert len({group % 2 for group in ids}) == 2
    dropping = open_parts(2, on_bad_group="drop")
    bad = numbered(99, advantages=torch.tensor(float("nan")))
    kept = dropping.put_many([[numbered(70)], [bad], *([numbered(71)] for _ in range(40))])
    assert len(kept) == 41
    assert stream.stats().ledger.filtered == 1
    assert stream.move(ids[:3], Status.ABORTED) == 3
    assert stream.counts()[Status.ABORTED] == 3


def test_each_partition_keeps_the_bound_of_staleness(open_parts: Open) -> None:
    stream = open_parts(4, max_staleness=1)
    put(stream, *range(4), policy_version=1)
    put(stream, *range(4, 8), policy_version=3)
    assert stream.advance(3) == 3
    lease = stream.take(4, timeout=0)
    assert sorted(numbers(lease)) == [4, 5, 6, 7]
    assert stream.is_fresh(lease)
    stream.advance(5)
    assert not stream.is_fresh(lease)
    assert not lease
    assert stream.stats().ledger.leased == 0
    stream.expire()
    assert stream.stats().ledger.expired == 8
    assert stream.staleness().current_version == 5


def test_all_processes_agree_on_the_partitions(
    open_parts: Open, client: Client, namespace: str
) -> None:
    open_parts(4)
    for other in (None, 1, 2):
        with pytest.raises(TaskMismatch, match="partitions is '4'"):
            ExperienceStream(client, "math", namespace=namespace, partitions=other)
    with ExperienceStream(client, "whole", namespace=namespace, partitions=1) as whole:
        assert type(whole) is ExperienceStream
    with pytest.raises(TaskMismatch, match="partitions is '1'"):
        ExperienceStream(client, "whole", namespace=namespace, partitions=4)


def test_every_method_of_a_stream_works_on_all_partitions_or_says_why_not(
    open_parts: Open,
) -> None:
    stream = open_parts(2, max_deliveries=1)
    stream.join_group()
    ids = put(stream, *range(6))
    lease = stream.take(6, timeout=0)
    lease.reject("test", lease.ids[:1])
    rejected = set(ids) - set(lease.ids)
    assert {letter.id for letter in stream.dead_letters(5)} == rejected
    first, *rest = lease.ids
    with pytest.raises(ConfigError, match="not in this lease"):
        lease.ack([10**6])
    lease.ack(rest)
    stream.settle({first: 1}, incarnation=lease.incarnation)
    assert stream.read(ids) == [None] * 6
    (last,) = put(stream, 6)
    assert [one.id for one in stream.read([last])] == [last]
    assert stream.clear() == 1
    put(stream, 0)
    assert len(stream) == 1


def test_ranks_take_one_batch_a_step_from_one_partition_after_the_other(open_parts: Open) -> None:
    ranks = [open_parts(2), open_parts(2)]
    put(ranks[0], *range(16))

    def take(rank: int, step: int) -> Lease:
        return ranks[rank].take(4, rank=rank, world_size=2, step=step, timeout=20)

    seen: list[int] = []
    with ThreadPoolExecutor(2) as threads:
        for step in range(3, 7):
            jobs = [threads.submit(take, rank, step) for rank in range(2)]
            parts = [job.result() for job in jobs]
            seen += [number for part in parts for number in numbers(part)]
            for part in parts:
                part.ack()
    assert sorted(seen) == list(range(16))


def test_a_loop_over_leases_prefetches_over_all_partitions(open_parts: Open) -> None:
    stream = open_parts(4)
    put(stream, *range(24))
    seen: list[int] = []
    with stream.leases(6, timeout=0.2) as loop, pytest.raises(BatchTimeout):
        for lease in loop:
            seen += numbers(lease)
    assert sorted(seen) == list(range(24))
    assert stream.stats().ledger.acked == 24


def test_a_saved_task_goes_on_in_as_many_partitions(
    open_parts: Open, client: Client, namespace: str, tmp_path: Path
) -> None:
    stream = open_parts(3, limit=30, max_deliveries=1)
    ids = put(stream, *range(12))
    lease = stream.take(6, timeout=0)
    lease.reject("test", lease.ids[:1])
    trained, incarnation = dict.fromkeys(lease.ids, 1), lease.incarnation
    stream.save(tmp_path / "math")
    saved = stream.save(tmp_path / "math")
    assert (saved.groups, saved.dead_letters) == (11, 1)
    assert len(list((tmp_path / "math").iterdir())) == 4, "the files of the first save are deleted"
    lease.ack()
    before = stream.stats()

    def opened(partitions: int, name: str = "copy") -> ExperienceStream:
        return ExperienceStream(client, "math", namespace=namespace + name, partitions=partitions)

    with opened(3) as copy:
        assert copy.resume(tmp_path / "math").groups == 11
        copy.resume(tmp_path / "math")  # nothing was put or taken since
        assert copy.stats().ledger.put == before.ledger.put
        assert copy.stats().limit == before.limit
        assert copy.settle(trained, incarnation=incarnation) == 5
        assert copy.stats().ledger == before.ledger
        assert [stored is None for stored in copy.read(ids)] == [
            stored is None for stored in stream.read(ids)
        ]
        put(copy, 12)
        rest = copy.take(7, timeout=0)
        assert sorted(numbers(rest)) == sorted([12, *numbers(stream.take(6, timeout=0))])
        rest.ack()
        put(copy, 13)
        with pytest.raises(ConfigError, match="holds 2 groups or dead letters"):
            copy.resume(tmp_path / "math")
        audit(each_partition(copy)[1])
    with opened(2, "two") as other, pytest.raises(ConfigError, match="partitions=3"):
        other.resume(tmp_path / "math")
    with opened(1, "plain") as plain:
        with pytest.raises(ConfigError, match="one of 3 partitions"):
            plain.resume(next((tmp_path / "math").glob("*.redrb")))
        with pytest.raises(ConfigError, match="with partitions=3, and this one has 1: resume into"):
            plain.resume(tmp_path / "math")
        with pytest.raises(ConfigError, match=r"in a file: give .*, such as .*math\.redrb"):
            plain.save(tmp_path / "math")
        plain.save(tmp_path / "plain")
    with opened(3, "three") as other:
        with pytest.raises(ConfigError, match="with partitions=1, and this one has 3: resume into"):
            other.resume(tmp_path / "plain")
        with pytest.raises(ConfigError, match="is saved in a directory: give the name of one"):
            other.save(tmp_path / "plain")
        with pytest.raises(ConfigError, match="No such file"):
            other.resume(tmp_path / "nowhere")
        (tmp_path / "empty").mkdir()
        with pytest.raises(ConfigError, match="give a file or directory that"):
            other.resume(tmp_path / "empty")
        index = tmp_path / "math" / "saved_tasks.json"
        files = json.loads(index.read_text())["files"]
        for wrong in ({"math": ["../a", "b"]}, {"math": []}, {"math": "a"}, ["a"], None):
            index.write_text(json.dumps({"format": 1, "files": wrong}))
            with pytest.raises(DecodeError, match="is no index of saved tasks"):
                other.resume(tmp_path / "math")
        index.write_text(json.dumps({"format": 1, "files": {**files, "code": files["math"]}}))
        with pytest.raises(ConfigError, match=r"tasks math, code: `ReplayBuffer\.resume` fills"):
            other.resume(tmp_path / "math")
        index.write_text(json.dumps({"format": 1, "files": {"math": files["math"][:2]}}))
        with pytest.raises(DecodeError, match="is not partition 0 of 2"):
            other.resume(tmp_path / "math")
        (tmp_path / "math" / files["math"][1]).unlink()
        index.write_text(json.dumps({"format": 1, "files": files}))
        with pytest.raises(ConfigError, match="the save is incomplete"):
            other.resume(tmp_path / "math")
