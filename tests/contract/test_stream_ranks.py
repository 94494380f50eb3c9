"""Ranks take the same steps: all get their parts of a batch, or all get the same error."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import redrb.connection.deadline
from redrb import BatchTimeout, ConfigError, ExperienceStream, Lease, LeaseLost, RedrbError, Status
from redrb.codec import EncodedGroup
from redrb.connection.client import Client
from redrb.errors import StoreError, StoreUnavailable, WrongStep
from redrb.stream.put.batch import PutBatch
from redrb.stream.ranks.calls import AskRead, AskStep, RankStep
from redrb.stream.ranks.ranks import PartRequest, Ranks
from redrb.stream.take.calls import TakeRequest
from redrb.stream.task.entries import entry_id
from redrb.stream.task.store import TaskStore
from tests.audit import audit
from tests.conftest import Opener
from tests.samples import numbered, numbers

Outcome = Lease | RedrbError


def fill(stream: ExperienceStream, count: int, first: int = 0) -> None:
    stream.put_many([[numbered(n)] for n in range(first, first + count)])


def ask(
    streams: list[ExperienceStream], count: int, step: int, *, timeout: float = 5, **options: Any
) -> list[Outcome]:
    """Let all ranks ask for a step at the same time; returns what each of them got."""

    def one(rank: int) -> Outcome:
        try:
            return streams[rank].take(
                count, rank=rank, world_size=len(streams), step=step, timeout=timeout, **options
            )
        except RedrbError as error:
            return error

    with ThreadPoolExecutor(len(streams)) as pool:
        return list(pool.map(one, range(len(streams))))


def leases(streams: list[ExperienceStream], count: int, step: int, **options: Any) -> list[Lease]:
    found = ask(streams, count, step, **options)
    for each in found:
        if isinstance(each, Exception):
            raise each
    return [each for each in found if isinstance(each, Lease)]


def end(parts: list[Lease]) -> None:
    """Acknowledge a step, rank 0 first."""
    for part in parts:
        part.ack()


def flat(lists: Iterable[list[int]]) -> list[int]:
    return sorted(itertools.chain.from_iterable(lists))


def take(
    stream: ExperienceStream, rank: int, world_size: int, step: int, count: int, timeout: float = 5
) -> Lease:
    return stream.take(count, rank=rank, world_size=world_size, step=step, timeout=timeout)


@pytest.mark.parametrize("world", [1, 2, 5, 64])
def test_each_rank_gets_its_part_of_each_step(open_stream, world):
    ranks = [open_stream() for _ in range(world)]
    fill(ranks[0], 4 * world)
    for step in range(2):
        parts = leases(ranks, 2 * world, step, timeout=30)
        first = 2 * world * step
        expected = [[first + rank, first + world + rank] for rank in range(world)]
        assert [numbers(part) for part in parts] == expected
        ledger = ranks[0].stats().ledger
        assert (ledger.acked, ledger.leased) == (first, 2 * world)
        for part in parts[1:]:
            part.ack()
            assert not part
        assert ranks[0].stats().ledger.acked == first  # rank 0 ends the step
        parts[0].ack()
    stats = ranks[0].stats()
    assert (stats.ledger.acked, stats.ledger.leased, stats.samples_acked) == (
        *(4 * world, 0),
        4 * world,
    )


def test_nothing_is_leased_before_all_ranks_have_asked_once(open_stream):
    ranks = [open_stream(), open_stream()]
    fill(ranks[0], 4)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(take, ranks[0], 0, 2, 0, 4)
        time.sleep(0.2)
        assert not first.done()
        assert ranks[0].stats().ledger.leased == 0
        second = take(ranks[1], 1, 2, 0, 4)
        assert numbers(first.result(30)) == [0, 2]
        assert numbers(second) == [1, 3]


@pytest.mark.parametrize("ended", ["", "clear", "drop_group"])
@pytest.mark.parametrize("world", [2, 5])
def test_ranks_wait_for_groups_and_are_woken(open_stream, only_wakes, world, ended):
    ranks, maker = [open_stream() for _ in range(world)], open_stream()
    maker.join_group()
    with ThreadPoolExecutor(world) as pool:
        waiting = [
            pool.submit(take, each, rank, world, 0, world) for rank, each in enumerate(ranks)
        ]
        time.sleep(0.2)
        began = time.monotonic()
        if ended:
            getattr(maker, ended)()
        fill(maker, world)
        assert flat(numbers(each.result(12)) for each in waiting) == list(range(world))
        assert time.monotonic() - began < 4  # no rank looked because its time was up


def test_ranks_that_wait_go_on_after_their_keys_are_lost(open_stream, client):
    ranks, maker = [open_stream() for _ in range(3)], open_stream()
    maker.join_group()
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(take, each, rank, 3, 7, 3) for rank, each in enumerate(ranks)]
        time.sleep(0.2)
        delete_keys_of_ranks(client, maker)
        fill(maker, 3)
        assert flat(numbers(each.result(12)) for each in waiting) == list(range(3))


def keys_of_ranks(client: Client, stream: ExperienceStream) -> list[str]:
    prefix = stream._task.store.keys.prefix
    names = [f"{prefix}{kind}:default" for kind in ("ranks", "rank_steps")]
    return [name for name in names if client.execute("EXISTS", name)]


def delete_keys_of_ranks(client: Client, stream: ExperienceStream) -> None:
    assert client.execute("DEL", *keys_of_ranks(client, stream)) == 2


def test_the_keys_of_ranks_go_with_the_group_and_the_task(open_stream, client):
    ranks = [open_stream(), open_stream()]
    for ended in (ranks[0].drop_group, ranks[0].clear):
        fill(ranks[0], 4)
        parts = leases(ranks, 4, 3)
        assert len(keys_of_ranks(client, ranks[0])) == 2
        ended()
        assert not keys_of_ranks(client, ranks[0])
        with pytest.raises(LeaseLost):
            parts[0].ack()


def test_ranks_go_on_between_steps_after_a_loss_of_their_keys(open_stream, client):
    ranks = [open_stream() for _ in range(3)]
    fill(ranks[0], 9)
    for step in range(3):
        end(leases(ranks, 3, step))
        delete_keys_of_ranks(client, ranks[0])
    assert ranks[0].stats().ledger.acked == 9


@pytest.mark.parametrize("ahead", [1, 130])
def test_the_next_steps_may_be_taken_before_this_one_is_acknowledged(open_stream, ahead):
    """Decisions are kept until all ranks have read them, and no longer."""
    ranks = [open_stream() for _ in range(3)]
    fill(ranks[0], 3 * (ahead + 1))
    kept = [leases(ranks, 3, 0)]
    kept[0] += [take(ranks[0], 0, 3, step, 3) for step in range(1, ahead + 1)]
    for rank in (1, 2):
        assert fields_of_steps(ranks[0]) > ahead
        kept.append([take(ranks[rank], rank, 3, step, 3) for step in range(1, ahead + 1)])
        expected = [[3 * step + rank] for step in range(1, ahead + 1)]
        assert [numbers(part) for part in kept[-1]] == expected
    assert fields_of_steps(ranks[0]) < 20 + ahead  # of rank 0, the numbers of unread ones
    for part in kept[0][3:] + kept[0][:3] + kept[1] + kept[2]:
        part.ack()
    assert ranks[0].stats().ledger.acked == 3 * (ahead + 1)
    with pytest.raises(BatchTimeout):
        take(ranks[0], 0, 3, ahead + 1, 3, timeout=0.1)
    assert fields_of_steps(ranks[0]) < 20


def fields_of_steps(stream: ExperienceStream) -> int:
    """Return how much the task keeps of the steps of ranks."""
    store = stream._task.store
    found: int = store.client.execute("HLEN", f"{store.keys.prefix}rank_steps:default")
    return found


def test_a_rank_has_one_wake_up_however_many_steps_it_has_not_waited_for(open_stream, client):
    ranks = [open_stream(), open_stream()]
    fill(ranks[0], 20)
    for step in range(10):
        end(leases(ranks, 2, step))
    prefix = ranks[0]._task.store.keys.prefix
    for name in client.execute("KEYS", f"{prefix}wake:*"):
        assert client.execute("LLEN", name) <= 1


def test_a_job_that_is_killed_and_starts_again_gets_the_same_parts_at_once(open_stream):
    ranks = [open_stream() for _ in range(3)]  # their leases last for half a minute
    fill(ranks[0], 12)
    expected = [numbers(part) for part in leases(ranks, 6, 4)]
    ahead = [numbers(part) for part in leases(ranks, 6, 5)]
    for each in ranks:
        stop_heartbeat(each)
    ranks = [open_stream() for _ in range(3)]
    began = time.monotonic()
    assert [numbers(part) for part in leases(ranks, 6, 4)] == expected
    assert [numbers(part) for part in leases(ranks, 6, 5)] == ahead
    assert time.monotonic() - began < 4


def stop_heartbeat(stream: ExperienceStream) -> None:
    """Let a process be silent, as after a kill; nobody knows it yet."""
    heartbeat, stream._consumer._heartbeat = stream._consumer._heartbeat, None
    if heartbeat is not None:
        heartbeat.stop()
        heartbeat._thread.join()


@pytest.mark.parametrize("first", [0, 1])
def test_a_process_that_starts_gets_no_parts_of_the_process_before(open_stream, first):
    """Whichever of the new processes comes first: the parts in Redis are for the old ones."""
    ranks = [open_stream(), open_stream()]
    fill(ranks[0], 4)
    leases(ranks, 4, 0)
    for each in ranks:
        stop_heartbeat(each)
    ranks = [open_stream(), open_stream()]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(take, ranks[first], first, 2, 0, 4)
        time.sleep(1.3)  # it looks again
        assert not waiting.done()
        other = take(ranks[1 - first], 1 - first, 2, 0, 4)
        parts = [waiting.result(30), other]
    assert flat(map(numbers, parts)) == [0, 1, 2, 3]
    end(parts[:: 1 if first == 0 else -1])
    assert ranks[0].stats().ledger.acked == 4


def test_a_batch_that_kills_its_ranks_again_and_again_becomes_dead_letters(open_stream):
    ranks = [open_stream(max_deliveries=3), open_stream()]
    fill(ranks[0], 8)
    for _ in range(3):
        assert flat(map(numbers, leases(ranks, 4, 0))) == [0, 1, 2, 3]
        for each in ranks:
            stop_heartbeat(each)
        ranks = [open_stream(), open_stream()]
    assert flat(map(numbers, leases(ranks, 4, 0))) == [4, 5, 6, 7]
    assert [letter.failed_deliveries for letter in ranks[0].dead_letters()] == [3] * 4


def test_rank_0_names_the_groups_of_all_ranks_for_a_checkpoint(open_stream):
    ranks = [open_stream(), open_stream()]
    fill(ranks[0], 8)
    first, second = leases(ranks, 4, 0)
    trained, incarnation = first.unacknowledged, first.incarnation
    assert trained == dict.fromkeys((*first.ids, *second.ids), 1)
    assert second.unacknowledged == {}
    for each in ranks:
        stop_heartbeat(each)
    ranks = [open_stream(), open_stream()]
    assert ranks[0].settle(trained, incarnation=incarnation) == 4
    parts = leases(ranks, 4, 1)
    assert flat(map(numbers, parts)) == [4, 5, 6, 7]
    end(parts)
    assert ranks[0].stats().ledger.acked == 8


def test_a_rank_that_asks_for_another_step_is_told_that_of_rank_0(open_stream):
    ranks = [open_stream(), open_stream()]
    fill(ranks[0], 8)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(take, ranks[0], 0, 2, 9, 4)
        with pytest.raises(WrongStep, match="Take step 9") as caught:
            take(ranks[1], 1, 2, 7, 4)
        assert (caught.value.step, caught.value.next_step) == (7, 9)
        assert numbers(first.result(30)) == [0, 2]
    assert numbers(take(ranks[1], 1, 2, 9, 4)) == [1, 3]
    assert [numbers(part) for part in leases(ranks, 4, 10)] == [[4, 6], [5, 7]]


def test_a_short_stream_ends_all_ranks_at_the_same_step(open_stream):
    ranks = [open_stream() for _ in range(3)]
    fill(ranks[0], 8)
    end(leases(ranks, 6, 0))
    errors = ask(ranks, 6, 1, timeout=0.3)
    for error in errors:
        assert isinstance(error, BatchTimeout)
        assert (error.wanted, error.available, error.missing_ranks) == (6, 2, ())
        assert str(error) == str(errors[0])
        assert "Of 8 groups put: 6 are acknowledged." in str(error)
        assert (error.fates["put_ever"], error.fates["leased_here"]) == (8, 0)
    assert len(ranks[0]) == 2
    fill(ranks[0], 4, first=8)
    assert [numbers(part) for part in leases(ranks, 6, 1)] == [[6, 9], [7, 10], [8, 11]]


@pytest.mark.parametrize("world", [3, 64])
def test_ranks_that_do_not_ask_are_named_on_all_others(open_stream, world):
    ranks = [open_stream() for _ in range(world)]
    fill(ranks[0], world)
    for error in ask_some(ranks, [rank for rank in range(world) if rank != 1], world):
        assert isinstance(error, BatchTimeout)
        assert "Ranks 1 did not ask" in str(error)
        assert (error.missing_ranks, error.available) == ((1,), world)
    with pytest.raises(BatchTimeout, match="Ranks 1 did not ask"):  # which comes too late
        take(ranks[1], 1, world, 0, world)
    assert len(leases(ranks, world, 0, timeout=30)) == world


@pytest.mark.parametrize("begun", [False, True])
def test_ranks_without_rank_0_end_in_time(open_stream, begun):
    ranks = [open_stream() for _ in range(3)]
    fill(ranks[0], 6)
    if begun:
        end(leases(ranks, 3, 0))
    began = time.monotonic()
    for error in ask_some(ranks, [1, 2], 3, step=1):
        assert isinstance(error, BatchTimeout)
        assert "Ranks 0 did not ask" in str(error)
    assert time.monotonic() - began < 3
    if begun:  # it gets the same error at the same step
        with pytest.raises(BatchTimeout, match="Ranks 0 did not ask"):
            take(ranks[0], 0, 3, 1, 3)
    assert len(leases(ranks, 3, 1)) == 3


def ask_some(
    streams: list[ExperienceStream], some: list[int], world: int, step: int = 0
) -> list[Outcome]:
    def one(rank: int) -> Outcome:
        try:
            return take(streams[rank], rank, world, step, world, timeout=max(0.4, world / 16))
        except RedrbError as error:
            return error

    with ThreadPoolExecutor(len(some)) as pool:
        return list(pool.map(one, some))


def test_at_the_end_of_data_parts_are_smaller_and_equal(open_stream):
    ranks = [open_stream(), open_stream()]
    fill(ranks[0], 5)
    parts = leases(ranks, 8, 0, timeout=0.2, at_least=3)
    assert [numbers(part) for part in parts] == [[0, 2], [1, 3]]
    audit(ranks[0])
    assert len(ranks[0]) == 1
    end(parts)
    assert ranks[0].stats().ledger.acked == 4
    for error in ask(ranks, 8, 1, timeout=0.1, at_least=1):
        assert isinstance(error, BatchTimeout)
        assert error.wanted == 2


def test_rank_0_takes_what_there_is_when_the_time_of_the_first_rank_is_up(open_stream):
    ranks = [open_stream(), open_stream()]
    fill(ranks[0], 2)
    end(leases(ranks, 2, 0))
    fill(ranks[0], 2, first=2)
    with ThreadPoolExecutor(1) as pool:
        began = time.monotonic()
        first = pool.submit(ranks[1].take, 8, rank=1, world_size=2, step=1, timeout=0.6, at_least=2)
        time.sleep(0.3)  # rank 0 writes a checkpoint
        own = ranks[0].take(8, rank=0, world_size=2, step=1, timeout=30, at_least=2)
        assert (numbers(own), numbers(first.result(30))) == ([2], [3])
        assert 0.5 < time.monotonic() - began < 3


def test_a_rank_whose_time_is_up_ends_the_take_of_all(open_stream):
    ranks = [open_stream(), open_stream()]
    fill(ranks[0], 2)
    end(leases(ranks, 2, 0))
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(take, ranks[0], 0, 2, 1, 2, 30)
        time.sleep(0.2)
        with pytest.raises(BatchTimeout):
            take(ranks[1], 1, 2, 1, 2, timeout=0.1)
        fill(ranks[0], 2, first=2)
        with pytest.raises(BatchTimeout):
            first.result(30)
    audit(ranks[0])
    assert len(ranks[0]) == 2
    assert [numbers(part) for part in leases(ranks, 2, 1)] == [[2], [3]]


@pytest.mark.parametrize("end_s", [None, 30])
def test_a_rank_that_begins_to_wait_later_ends_the_take_of_rank_0_too(
    open_stream, only_wakes, end_s
):
    ranks = [open_stream() for _ in range(3)]
    fill(ranks[0], 3)
    end(leases(ranks, 3, 0))
    with ThreadPoolExecutor(2) as pool:
        waiting = [
            pool.submit(ranks[rank].take, 3, rank=rank, world_size=3, step=1, timeout=end_s)
            for rank in (0, 1)
        ]
        time.sleep(0.3)
        began = time.monotonic()
        with pytest.raises(BatchTimeout):
            take(ranks[2], 2, 3, 1, 3, timeout=0.5)
        for each in waiting:
            with pytest.raises(BatchTimeout):
                each.result(30)
        assert 0.4 < time.monotonic() - began < 5  # no rank looked because its time was up
    fill(ranks[0], 3, first=3)
    assert [numbers(part) for part in leases(ranks, 3, 1)] == [[3], [4], [5]]


def test_a_rank_that_starts_again_does_not_end_the_take_of_rank_0(open_stream):
    ranks = [open_stream(), open_stream()]
    fill(ranks[0], 3)
    end(leases(ranks, 2, 0))
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(ranks[0].take, 4, rank=0, world_size=2, step=1, timeout=30, at_least=2)
        time.sleep(0.2)
        ranks[1] = open_stream()
        other = pool.submit(ranks[1].take, 4, rank=1, world_size=2, step=1, timeout=30, at_least=2)
        time.sleep(1.3)  # they look again
        fill(ranks[0], 3, first=3)
        assert [numbers(each.result(30)) for each in (first, other)] == [[2, 4], [3, 5]]


def test_a_batch_that_can_never_be_full_is_an_error_on_all_ranks(open_stream):
    ranks = [open_stream(limit=4), open_stream()]
    for error in ask(ranks, 8, 0):
        assert isinstance(error, ConfigError)
        assert "4" in str(error)


def test_of_two_processes_with_one_rank_the_older_one_gets_an_error(open_stream):
    older = [open_stream(), open_stream()]
    fill(older[0], 8)
    old = leases(older, 4, 0)
    newer = [open_stream(), open_stream()]
    assert flat(map(numbers, leases(newer, 4, 0))) == [0, 1, 2, 3]
    with pytest.raises(LeaseLost):
        old[0].ack()
    for rank, each in enumerate(older):
        with pytest.raises(ConfigError, match=f"another process has taken rank {rank} over"):
            take(each, rank, 2, 1, 4)


def test_a_rank_that_starts_again_alone_goes_on_at_the_step_of_the_others(open_stream):
    ranks = [open_stream(), open_stream()]
    fill(ranks[0], 8)
    end(leases(ranks, 4, 0))
    stop_heartbeat(ranks[1])
    ranks[1] = open_stream()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(take, ranks[1], 1, 2, 1, 4)
        time.sleep(0.2)
        own = take(ranks[0], 0, 2, 1, 4)
        assert (numbers(own), numbers(first.result(30))) == ([4, 6], [5, 7])
    own.ack()
    assert ranks[0].stats().ledger.acked == 8


def test_another_number_of_ranks_and_another_batch_size(open_stream):
    ranks = [open_stream() for _ in range(3)]
    fill(ranks[0], 12)
    end(leases(ranks, 6, 0))
    end(leases(ranks[:2], 2, 1))
    assert [numbers(part) for part in leases(ranks, 3, 2)] == [[8], [9], [10]]


def test_ranks_that_ask_for_different_batches_get_an_error(open_stream):
    ranks = [open_stream(), open_stream()]
    fill(ranks[0], 8)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(take, ranks[0], 0, 2, 0, 4)
        with pytest.raises(ConfigError, match="All ranks must ask for the same"):
            take(ranks[1], 1, 2, 0, 6)
        assert numbers(first.result(30)) == [0, 2]
    assert numbers(take(ranks[1], 1, 2, 0, 4)) == [1, 3]


def test_ranks_and_other_takes_share_a_consumer_group(open_stream):
    ranks, other = [open_stream(), open_stream()], open_stream()
    fill(other, 8)
    held = other.take(2, timeout=0)
    parts = leases(ranks, 4, 0)
    assert [numbers(held), *map(numbers, parts)] == [[0, 1], [2, 4], [3, 5]]
    assert numbers(other.take(2, timeout=0)) == [6, 7]


def test_a_part_is_acknowledged_with_the_take_of_the_next(open_stream):
    stream = open_stream()
    fill(stream, 4)
    lease = stream.take(2, rank=0, world_size=1, step=0, timeout=0)
    following = stream.take(2, rank=0, world_size=1, step=1, timeout=0, ack=lease)
    assert stream.stats().ledger.acked == 2
    following.ack()


def test_a_step_whose_lease_rank_0_drops_is_requeued(open_stream):
    ranks = [open_stream(lease_ms=300), open_stream()]
    fill(ranks[0], 4)
    parts = leases(ranks, 4, 0)
    del parts[1:]
    gc.collect()
    time.sleep(0.4)
    assert ranks[0].stats().ledger.leased == 4  # another rank's does nothing
    del parts[:]
    gc.collect()
    assert len(ranks[1].take(4, timeout=10)) == 4


@pytest.mark.parametrize("how", ["release", "fail"])
def test_rank_0_requeues_the_groups_of_all_and_another_rank_its_own(open_stream, how):
    ranks = [open_stream(), open_stream()]
    fill(ranks[0], 4)

    def finish(part: Lease) -> None:
        part.release() if how == "release" else part.fail("bad step")

    for step, rank in enumerate((1, 0)):
        parts = leases(ranks, 4, step)
        finish(parts[rank])
        assert len(ranks[0]) == (2 if rank else 4)
        if rank:
            finish(parts[0])
    assert flat(map(numbers, leases(ranks, 4, 2))) == [0, 1, 2, 3]
    prefix = ranks[0]._task.store.keys.prefix
    failed = ranks[0]._task.store.client.execute("HVALS", f"{prefix}deliveries:default")
    assert failed == ([b"2"] * 4 if how == "fail" else [])


@pytest.mark.parametrize("how", ["ack", "release", "fail", "forward"])
@pytest.mark.parametrize("pieces", [1, 2])
def test_rank_0_ends_groups_that_it_names_and_no_group_of_other_ranks(
    open_stream, client, how, pieces
):
    ranks = [open_stream(), open_stream()]
    fill(ranks[0], 8)
    first, second = leases(ranks, 8, 0)
    following = ExperienceStream(client, "next", namespace=ranks[0].namespace)
    most = len(first) // pieces
    for ids in (first.ids[:most], first.ids[most:]):
        if not ids:
            continue
        if how == "forward":
            groups = dict(zip(first.ids, first.groups(), strict=True))
            first.forward(following, {seq: groups[seq] for seq in ids})
        else:
            getattr(first, how)(*(["bad"] if how == "fail" else []), ids=ids)
    ledger = ranks[0].stats().ledger
    done = 4 if how in ("ack", "forward") else 0
    assert (ledger.acked, ledger.leased, ledger.waiting) == (done, 4, 4 - done)
    assert (len(first), bool(first), first.unacknowledged) == (
        *(0, True),
        dict.fromkeys(second.ids, 1),
    )
    second.reject("bad", second.ids[:1])
    first.ack()
    assert not first
    ledger = ranks[0].stats().ledger
    assert (ledger.acked, ledger.dead, ledger.leased) == (done + 3, 1, 0)
    following.close()


def test_an_error_in_the_block_of_rank_0_fails_the_whole_step(open_stream):
    ranks = [open_stream(max_deliveries=1), open_stream()]
    fill(ranks[0], 4)
    with pytest.raises(ZeroDivisionError), leases(ranks, 4, 0)[0]:
        raise ZeroDivisionError
    assert ranks[0].stats().ledger.dead == 4


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("groups", [8, 20])
def test_groups_that_are_rejected_or_expired_leave_at_once(open_stream, pages, rank, groups):
    pages(failed=3, ended=3)
    ranks = [open_stream(), open_stream()]
    fill(ranks[0], groups)
    parts = leases(ranks, groups, 0)
    part = parts[rank]
    part.reject("nan loss", part.ids[:1])
    part.expire(part.ids[:1])
    audit(ranks[0])
    ledger = ranks[0].stats().ledger
    assert (ledger.dead, ledger.expired, ledger.leased) == (1, 1, groups - 2)
    with pytest.raises(ConfigError, match="not in this lease"):
        part.reject("another's", parts[1 - rank].ids[:1])
    part.reject("all of it")
    assert len(part) == 0
    assert ranks[0].stats().ledger.dead == groups // 2 - 1
    end([each for each in parts if each])
    ledger = ranks[0].stats().ledger
    assert (ledger.acked, ledger.dead, ledger.leased) == (groups // 2, groups // 2 - 1, 0)


def test_groups_that_a_rank_rejects_after_the_end_of_the_step_are_acknowledged(open_stream):
    ranks = [open_stream(), open_stream()]
    fill(ranks[0], 4)
    first, second = leases(ranks, 4, 0)
    first.ack()
    second.reject("too late", second.ids[:1])  # it is acknowledged, and nothing happens
    assert (ranks[0].stats().ledger.acked, ranks[0].stats().ledger.dead) == (4, 0)


@pytest.mark.parametrize("how", ["release", "fail"])
@pytest.mark.parametrize("pieces", [1, 2])
def test_groups_that_a_rank_ends_after_rank_0_has_requeued_them_are_lost(open_stream, how, pieces):
    ranks = [open_stream(max_deliveries=9), open_stream()]
    fill(ranks[0], 8)
    reason = ["bad"] if how == "fail" else []
    for step, named in enumerate(("reject", "expire", "release")):
        first, second = leases(ranks, 8, step)
        if pieces == 2:
            getattr(first, how)(*reason, ids=first.ids[:2])
        getattr(first, how)(*reason)
        with pytest.raises(LeaseLost, match="rank 0 has lost its lease, or this step has ended"):
            getattr(second, named)(*(["bad"] if named == "reject" else []), ids=second.ids[:1])
    assert len(ranks[0]) == 8


def test_an_acknowledgement_waits_until_all_ranks_have_read(open_stream, only_wakes):
    """A GPU may do rank 0's step later than its process goes on."""
    ranks = [open_stream() for _ in range(3)]
    fill(ranks[0], 9)
    end(leases(ranks, 3, 0))
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(lambda: take(ranks[0], 0, 3, 1, 3).ack())
        for rank in (2, 1):
            time.sleep(0.2)
            assert not ended.done()
            assert numbers(take(ranks[rank], rank, 3, 1, 3)) == [3 + rank]
        ended.result(4)
    assert ranks[0].stats().ledger.acked == 6
    assert [numbers(part) for part in leases(ranks, 3, 2)] == [[6], [7], [8]]


def test_a_step_that_a_rank_never_reads_is_not_acknowledged(open_stream):
    ranks = [open_stream(lease_ms=600), open_stream()]
    fill(ranks[0], 4)
    end(leases(ranks, 2, 0))
    part = take(ranks[0], 0, 2, 1, 2)
    with pytest.raises(LeaseLost, match="its part was not read by rank 1"):
        part.ack()
    assert not part
    assert (ranks[0].stats().ledger.acked, len(ranks[0])) == (2, 2)


@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize("ahead", [0, 3])
def test_a_step_whose_reader_starts_again_is_acknowledged_if_it_was_read(open_stream, ahead, asks):
    """`asks`: whether rank 0 has asked for its next step since the other rank started again."""
    ranks = [open_stream() for _ in range(3)]
    fill(ranks[0], 6 + 3 * ahead)
    [read, *_] = leases(ranks, 3, 0)
    unread = [take(ranks[0], 0, 3, step, 3) for step in range(1, 2 + ahead)]
    take(ranks[2], 2, 3, 1, 3)
    ranks[1] = open_stream()
    with ThreadPoolExecutor(3) as pool:
        steps = [pool.submit(take, ranks[1], 1, 3, 9, 3, 0.6)]
        time.sleep(0.2)
        if asks:
            steps += [pool.submit(take, ranks[rank], rank, 3, 9, 3, 0.6) for rank in (0, 2)]
        for each in steps:
            with pytest.raises(BatchTimeout):
                each.result(30)
    read.ack()
    assert ranks[0].stats().ledger.acked == 3
    began = time.monotonic()
    for part in unread:
        with pytest.raises(LeaseLost, match="a rank has started again before it had read"):
            part.ack()
    assert time.monotonic() - began < 10  # it waits for nobody
    ledger = ranks[0].stats().ledger
    assert (ledger.acked, ledger.waiting) == (3, 3 + 3 * ahead)


def test_a_rank_that_reads_after_the_groups_are_gone_gets_an_error(open_stream, client):
    ranks = [open_stream(), open_stream()]
    fill(ranks[0], 6)
    end(leases(ranks, 2, 0))
    own = take(ranks[0], 0, 2, 1, 2)
    client.execute("XDEL", ranks[0]._task.store.keys.stream, entry_id(4))
    with pytest.raises(LeaseLost, match="rank 0 has ended this step already"):
        take(ranks[1], 1, 2, 1, 2)
    own.ack()
    assert [numbers(part) for part in leases(ranks, 2, 2)] == [[4], [5]]


@pytest.mark.parametrize("rank", [0, 1])
def test_misfits_become_dead_letters_and_the_others_are_requeued(open_stream, rank):
    ranks = [open_stream(), open_stream()]
    odd = numbered(4 + rank, advantages=torch.zeros(2))
    ranks[0].put_many([[odd if n == 4 + rank else numbered(n)] for n in range(8)])
    parts = leases(ranks, 8, 0)
    with pytest.raises(ValueError, match="batch"), parts[rank]:
        parts[rank].batch()
    if rank:
        parts[0].release()
    ledger = ranks[0].stats().ledger
    assert (ledger.dead, ledger.waiting) == (1, 7)


def test_a_group_that_cannot_be_decoded_costs_no_rank_a_group(open_stream):
    ranks = [open_stream(), open_stream()]
    garbage = EncodedGroup(b"\xff" * 20, 1, None, Status.COMPLETED)
    ranks[0]._producer.put(PutBatch((garbage,)))
    fill(ranks[0], 4)
    assert [numbers(part) for part in leases(ranks, 4, 0)] == [[0, 2], [1, 3]]
    assert ranks[0].stats().ledger.dead == 1


def sized(number: int, length: int) -> list[Any]:
    return [numbered(number, sequences=torch.ones(length, dtype=torch.int64))]


@pytest.mark.parametrize("order", ["fifo", "stalest"])
def test_parts_are_balanced_by_tokens(open_stream, order):
    ranks = [open_stream(order=order) for _ in range(2)]
    lengths = [100, 2, 3, 99, 50, 7, 8, 51]
    ranks[0].put_many([sized(n, length) for n, length in enumerate(lengths)], policy_version=1)
    parts = leases(ranks, 8, 0, balance="tokens")
    totals = [sum(lengths[n] for n in numbers(part)) for part in parts]
    assert {len(part) for part in parts} == {4}
    assert max(totals) - min(totals) <= 2


def test_orders_queries_and_statuses_are_those_of_other_takes(open_stream):
    ranks = [open_stream(order="lifo", tags=["score"]) for _ in range(2)]
    for n in range(6):
        ranks[0].put([numbered(n, tags={"score": n})])
    ranks[0].put_many([[numbered(n)] for n in (10, 11)], status=Status.ABORTED)
    parts = leases(ranks, 4, 0, where={"score_lt": 4})
    assert [numbers(part) for part in parts] == [[3, 1], [2, 0]]
    aborted = leases(ranks, 2, 1, status=Status.ABORTED)
    assert [numbers(part) for part in aborted] == [[11], [10]]
    end(parts + aborted)
    for error in ask(ranks, 4, 2, timeout=0.1, where={"score_lt": 4}):
        assert isinstance(error, BatchTimeout)
        assert error.available == 0


def test_groups_that_are_too_stale_expire_before_a_step_is_taken(open_stream):
    ranks = [open_stream(order="stalest", max_staleness=2) for _ in range(2)]
    for version in (1, 2, 5, 6):
        ranks[0].put([numbered(version)], policy_version=version)
    ranks[0].advance(7)
    parts = leases(ranks, 2, 0)
    assert [numbers(part) for part in parts] == [[5], [6]]
    end(parts)
    assert ranks[0].stats().ledger.expired == 2
    expired = leases(ranks, 2, 1, status=Status.EXPIRED) if len(ranks[0]) else []
    assert all(len(part.expiries) == 1 for part in expired)


def test_groups_that_are_read_again_are_in_later_steps(open_stream):
    ranks = [open_stream(max_reads=2) for _ in range(2)]
    fill(ranks[0], 2)
    for step in range(2):
        parts = leases(ranks, 2, step)
        assert [numbers(part) for part in parts] == [[0], [1]]
        end(parts)
        audit(ranks[0])
    stats = ranks[0].stats()
    assert (stats.ledger.acked, stats.reads, stats.samples_acked) == (2, 2, 4)


def test_drawn_parts_know_their_probabilities(open_stream):
    ranks = [open_stream(order="prioritized") for _ in range(2)]
    for n in range(1, 5):
        ranks[0].put([numbered(n)], priority=float(n))
    parts = leases(ranks, 4, 0)
    probabilities: dict[int, float] = {}
    for part in parts:
        probabilities.update(zip(numbers(part), part.probabilities, strict=True))
        assert part.importance_weights().shape == (2,)
    assert sum(probabilities.values()) == pytest.approx(1)
    assert sorted(probabilities, key=lambda number: probabilities[number]) == [1, 2, 3, 4]


def test_groups_that_ranks_lease_are_saved_as_waiting(open_stream, client, tmp_path):
    ranks = [open_stream(), open_stream()]
    fill(ranks[0], 4)
    leases(ranks, 4, 0)
    ranks[0].save(tmp_path / "task")
    with ExperienceStream(client, "copy", namespace=ranks[0].namespace) as copy:
        copy.resume(tmp_path / "task")
        assert numbers(copy.take(4, timeout=0)) == [0, 1, 2, 3]
        audit(copy)


AWAY = StoreUnavailable("away", where="here", uncertain=True)


@contextmanager
def cut_off_decisions(
    stream: ExperienceStream,
    monkeypatch: pytest.MonkeyPatch,
    *,
    arrives: bool,
    error: BaseException = AWAY,
) -> Iterator[None]:
    """Let the reply to each decision of rank 0 be lost, or already the request."""
    store = stream._task.store
    call = store.call

    def cut(asked, *beside):
        decides = isinstance(asked, AskStep) and asked.decision is not None
        reply = call(asked, *beside) if arrives or not decides else None
        if decides:
            raise error
        return reply

    with monkeypatch.context() as patch:
        patch.setattr(store, "call", cut)
        yield


@pytest.mark.parametrize("error", [AWAY, KeyboardInterrupt()], ids=["away", "interrupt"])
@pytest.mark.parametrize("arrives", [False, True])
def test_rank_0_goes_on_with_a_batch_after_its_decision_was_cut_off(
    open_stream, monkeypatch, arrives, error
):
    ranks = [open_stream(), open_stream()]
    fill(ranks[0], 8)
    end(leases(ranks, 4, 0))
    with (
        cut_off_decisions(ranks[0], monkeypatch, arrives=arrives, error=error),
        pytest.raises(type(error)),
    ):
        take(ranks[0], 0, 2, 1, 4)
    assert [numbers(part) for part in leases(ranks, 4, 1)] == [[4, 6], [5, 7]]


def test_rank_0_that_gives_up_a_batch_which_others_have_gets_an_error(open_stream, monkeypatch):
    ranks = [open_stream(), open_stream()]
    fill(ranks[0], 8)
    end(leases(ranks, 4, 0))
    with cut_off_decisions(ranks[0], monkeypatch, arrives=True), pytest.raises(StoreUnavailable):
        take(ranks[0], 0, 2, 1, 4)
    with pytest.raises(LeaseLost, match="Start all ranks again"):
        take(ranks[0], 0, 2, 2, 4)
    assert len(ranks[0]) == 4


@pytest.mark.parametrize(
    "text",
    [b"", b"{}", b"[]", b"\xff", b'{"step": 1, "spec": "x"}', b'{"step": 1, "spec": "x", "p": 1'],
)
def test_a_damaged_decision_is_an_error(open_stream, text):
    ranks = [open_stream(), open_stream()]
    fill(ranks[0], 4)
    end(leases(ranks, 2, 0))
    store = ranks[0]._task.store
    store.client.execute("HSET", f"{store.keys.prefix}rank_steps:default", 1, text)
    for error in ask(ranks, 2, 1):
        assert isinstance(error, StoreError)


@pytest.mark.parametrize(
    "options",
    [
        {"rank": 0},
        {"rank": 0, "world_size": 2},
        {"world_size": 2, "step": 0},
        {"balance": "tokens"},
        {"rank": 2, "world_size": 2, "step": 0},
        {"rank": -1, "world_size": 2, "step": 0},
        {"rank": 0, "world_size": 3, "step": 0},
        {"rank": 0, "world_size": 0, "step": 0},
        {"rank": 0, "world_size": 2, "step": -1},
        {"rank": "0", "world_size": 2, "step": 0},
        {"rank": 0, "world_size": 2, "step": 0, "balance": "samples"},
    ],
)
@pytest.mark.parametrize("url", ["fake://ranks"])
def test_arguments_that_do_not_fit_are_refused(open_stream, options):
    with pytest.raises(ConfigError):
        open_stream().take(4, timeout=0, **options)


class Killed(BaseException):
    """Ends a rank of a job, as SIGKILL does: nothing that it does after this reaches Redis."""


@dataclass
class Kill:
    """Kills a rank at one of its requests, before it is sent or after it was answered."""

    rank: int
    request: int
    answered: bool
    over: bool = False

    def count(self) -> bool:
        """Count a request of the rank; returns whether it is the one."""
        self.request -= 1
        return self.request < 0 and not self.over


@dataclass
class Job:
    """A data-parallel job: ranks that train in step, and start again together from a checkpoint."""

    open_stream: Opener
    world: int
    steps: int
    count: int
    step: int = 0  # the checkpoint: next step, numbers trained, groups not acknowledged
    trained: list[int] = field(default_factory=list)
    unacknowledged: dict[int, int] = field(default_factory=dict)
    incarnation: str = ""
    here: Any = field(default_factory=threading.local)

    def run(self, kill: Kill | None) -> bool:
        """Train to the end, or until a rank is killed; returns whether the end was reached."""
        streams = [self.open_stream(max_deliveries=1000) for _ in range(self.world)]
        together = threading.Barrier(self.world)
        parts: list[list[int]] = [[] for _ in streams]
        if self.unacknowledged:
            streams[0].settle(self.unacknowledged, incarnation=self.incarnation)

        def work(rank: int) -> bool:
            self.here.rank, self.here.kill = rank, kill
            try:
                for step in range(self.step, self.steps):
                    lease = take(streams[rank], rank, self.world, step, self.count, timeout=20)
                    parts[rank] = numbers(lease)
                    together.wait(20)  # as gradients are averaged
                    if rank == 0:
                        self.step, self.trained = step + 1, self.trained + flat(parts)
                        self.unacknowledged = lease.unacknowledged
                        self.incarnation = lease.incarnation
                    together.wait(20)
                    lease.ack()
                return True
            except (Killed, threading.BrokenBarrierError):
                if kill is not None:
                    kill.over = True
                together.abort()
                return False
            finally:
                self.here.kill = None

        with ThreadPoolExecutor(self.world) as pool:
            ended = list(pool.map(work, range(self.world)))
        for stream in streams:
            stop_heartbeat(stream)
        return all(ended)

    @contextmanager
    def killing(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Let the requests of each rank's thread be counted, and all end once one is killed."""

        def counted(send: Callable[..., Any]) -> Callable[..., Any]:
            def sent(*arguments: Any, **options: Any) -> Any:
                kill = getattr(self.here, "kill", None)
                if kill is None:
                    return send(*arguments, **options)
                if kill.over:
                    raise Killed
                now = self.here.rank == kill.rank and kill.count()
                if now and not kill.answered:
                    kill.over = True
                    raise Killed
                reply = send(*arguments, **options)
                if now or kill.over:
                    kill.over = True
                    raise Killed
                return reply

            return sent

        with monkeypatch.context() as patch:
            for name in ("exchange", "once"):
                patch.setattr(Client, name, counted(getattr(Client, name)))
            patch.setattr(redrb.connection.deadline, "SLICE_S", 0.05)
            yield


@pytest.mark.long
@pytest.mark.parametrize("answered", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_job_that_is_killed_anywhere_trains_every_group_once(
    open_stream, monkeypatch, rank, answered
):
    for request in range(100):
        job = Job(open_stream, world=2, steps=2, count=4)
        watcher = open_stream()
        watcher.clear()
        fill(watcher, 8)
        with job.killing(monkeypatch):
            ended = job.run(Kill(rank, request, answered))
            assert ended or job.run(None)
        assert sorted(job.trained) == list(range(8))
        ledger = watcher.stats().ledger
        assert (ledger.acked, ledger.leased, ledger.waiting) == (8, 0, 0), request
        if ended:
            assert request > (7 if rank == 0 else 5)
            return
    raise AssertionError("it never reached its end")


def test_a_part_that_is_read_again_is_read_once(open_stream, monkeypatch):
    """The reply with its groups was lost, so the rank asks again; the others have still to read."""
    ranks = [open_stream(lease_ms=600), open_stream(), open_stream()]
    fill(ranks[0], 6)
    end(leases(ranks, 3, 0))
    part = take(ranks[0], 0, 3, 1, 3)
    payload = Ranks._payload

    def lost(*arguments: Any) -> Any:
        payload(*arguments)
        arguments[0]._number -= 1
        raise StoreUnavailable("lost", where="", uncertain=True)

    for _ in range(3):
        monkeypatch.setattr(Ranks, "_payload", lost)
        with pytest.raises(StoreUnavailable):
            take(ranks[1], 1, 3, 1, 3)
        monkeypatch.undo()
    assert numbers(take(ranks[1], 1, 3, 1, 3)) == [4]
    with pytest.raises(LeaseLost, match="its part was not read by rank 2"):
        part.ack()
    assert ranks[0].stats().ledger.acked == 3


def test_a_part_that_a_rank_reads_again_is_waited_for(open_stream):
    """The reply with its groups was lost, and rank 0 is ahead."""
    ranks = [open_stream(lease_ms=600), open_stream()]
    fill(ranks[0], 6)
    end(leases(ranks, 2, 0))
    part, _ = (take(ranks[rank], rank, 2, 1, 2) for rank in (0, 1))
    again = PartRequest(RankStep(1, 2, 1), TakeRequest(2, 2, Status.COMPLETED, ""), None)
    ranks[1]._ranks._number -= 1
    assert ranks[1]._ranks._ask(again, None).decision
    following = take(ranks[0], 0, 2, 2, 2)
    with pytest.raises(LeaseLost, match="its part was not read by rank 1"):
        part.ack()
    following.release()


@pytest.mark.parametrize("restarts", [(), (1,), (0,), (2, 1), (0, 1, 2)])
def test_requests_of_ranks_may_all_be_repeated(open_stream, monkeypatch, restarts):
    """The reply to each was lost, so it has been done already."""
    call, payload = TaskStore.call, Ranks._payload
    asked: dict[str, threading.Event] = defaultdict(threading.Event)

    def call_twice(self, asking, *arguments):
        if isinstance(asking, AskStep | AskRead):
            call(self, asking, *arguments)
        reply = call(self, asking, *arguments)
        if isinstance(asking, AskStep):
            asked[asking.consumer].set()
        return reply

    def payload_twice(self, *arguments):
        number = self._number
        payload(self, *arguments)
        self._number = number
        return payload(self, *arguments)

    monkeypatch.setattr(TaskStore, "call", call_twice)
    monkeypatch.setattr(Ranks, "_payload", payload_twice)
    ranks = [open_stream() for _ in range(3)]
    fill(ranks[0], 15)
    for step in range(3):
        end(leases(ranks, 3, step))
    for rank in restarts:
        stop_heartbeat(ranks[rank])
        ranks[rank] = open_stream()
    with ThreadPoolExecutor(3) as pool:
        parts = {}
        for rank in (*restarts, *({0, 1, 2} - set(restarts))):
            parts[rank] = pool.submit(take, ranks[rank], rank, 3, 3, 3)
            if rank in restarts:
                assert asked[ranks[rank]._consumer.name].wait(30)
        found = [parts[rank].result(30) for rank in range(3)]
    assert [numbers(part) for part in found] == [[9], [10], [11]]
    end(found)
    end(leases(ranks, 3, 4))
    assert ranks[0].stats().ledger.acked == 15


@pytest.mark.parametrize("rank", [1, 2])
def test_a_rank_that_starts_again_gets_no_error_of_the_process_before(open_stream, rank):
    """Not all ranks had come before, and rank 0 has not started again yet."""
    ranks = [open_stream() for _ in range(3)]
    fill(ranks[0], 6)
    for error in ask_some(ranks, [1, 2], 3):
        assert isinstance(error, BatchTimeout)
    ranks = [open_stream() for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        parts = [pool.submit(take, ranks[rank], rank, 3, 0, 3)]
        time.sleep(0.2)
        assert not parts[0].done()
        others = {0, 1, 2} - {rank}
        parts += [pool.submit(take, ranks[other], other, 3, 0, 3) for other in others]
        assert flat(numbers(part.result(30)) for part in parts) == [0, 1, 2]


def test_rank_0_learns_that_its_decision_stands_though_a_rank_has_started_again(
    open_stream, monkeypatch
):
    ranks = [open_stream() for _ in range(3)]
    fill(ranks[0], 9)
    end(leases(ranks, 3, 0))
    with cut_off_decisions(ranks[0], monkeypatch, arrives=True), pytest.raises(StoreUnavailable):
        take(ranks[0], 0, 3, 1, 3)
    ranks[1] = open_stream()
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(take, ranks[1], 1, 3, 2, 3)]
        time.sleep(0.2)
        own = take(ranks[0], 0, 3, 1, 3)
        assert numbers(own) == [3]
        with pytest.raises(LeaseLost, match="a rank has started again before it had read"):
            own.ack()
        waiting.append(pool.submit(take, ranks[2], 2, 3, 2, 3))
        assert numbers(take(ranks[0], 0, 3, 2, 3)) == [3]
        assert [numbers(each.result(30)) for each in waiting] == [[4], [5]]
