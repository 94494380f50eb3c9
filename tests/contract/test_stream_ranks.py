"""Ranks take the same steps: all get their parts of a step, or all get the same error."""

from __future__ import annotations

import gc
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

from redrb import BatchTimeout, ConfigError, ExperienceStream, Lease, LeaseLost, RedrbError, Status
from redrb.codec import EncodedGroup
from redrb.errors import DecodeError, RankLost, WrongStep
from redrb.stream.put.batch import PutBatch
from redrb.stream.ranks import ranks as forming
from redrb.stream.ranks.calls import MOST_STEPS, FinishPart, PartEnd
from redrb.stream.take.calls import Take, TakeReply
from redrb.stream.task.entries import entry_id
from tests.audit import audit, kill_consumer
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


def flat(lists: Iterable[list[int]]) -> list[int]:
    return sorted(itertools.chain.from_iterable(lists))


def take(stream: ExperienceStream, rank: int, world_size: int, step: int, count: int) -> Lease:
    return stream.take(count, rank=rank, world_size=world_size, step=step, timeout=5)


@pytest.mark.parametrize("groups", [4, 13])
def test_a_part_is_handed_out_and_failed_in_commands_of_some_groups(
    open_stream, client, pages, groups
):
    pages(arguments=4)
    stream = open_stream()
    fill(stream, groups)
    part = take(stream, 0, 1, 0, groups)
    assert flat([numbers(part)]) == list(range(groups))
    part.fail("once")
    again = take(stream, 0, 1, 0, groups)
    assert flat([numbers(again)]) == list(range(groups))
    deliveries = client.execute("HVALS", f"{stream._task.store.keys.prefix}deliveries:default")
    assert deliveries == [b"1"] * groups
    again.ack()
    assert stream.stats().ledger.acked == groups
    audit(stream)


def test_entries_that_another_client_deletes_are_left_out_of_the_parts(
    open_stream, client, pages, monkeypatch
):
    pages(arguments=4)
    stream = open_stream()
    fill(stream, 13)
    deal = forming.deal

    def deal_late(*arguments):
        ids = [entry_id(seq) for seq in (2, 5, 13)]
        assert client.execute("XDEL", stream._task.store.keys.stream, *ids) == 3
        return deal(*arguments)

    monkeypatch.setattr(forming, "deal", deal_late)
    part = take(stream, 0, 1, 0, 13)
    assert part.ids == (1, 3, 4, 6, 7, 8, 9, 10, 11, 12)
    part.ack()
    ledger = stream.stats().ledger
    assert (ledger.acked, ledger.evicted, ledger.leased, ledger.waiting) == (10, 3, 0, 0)


def test_a_step_that_is_acknowledged_in_part_is_ended_by_a_rank_that_starts(
    open_stream, pages, monkeypatch
):
    """The rank whose acknowledgement was the last one died after its first page."""
    pages(ended=3)
    ranks = [open_stream(), open_stream()]
    fill(ranks[0], 16)
    first, second = leases(ranks, 8, 0)
    first.ack()
    with monkeypatch.context() as broken:
        broken.setattr(second.parts[0].holder.store, "pages", lambda _: iter([PartEnd()]))
        second.ack()
    assert ranks[0].stats().ledger.acked == 3
    kill_consumer(ranks[0])
    kill_consumer(ranks[1])
    anew = [open_stream(), open_stream()]
    assert all(isinstance(each, WrongStep) for each in ask(anew, 8, 0))
    assert ranks[0].stats().ledger.acked == 8
    parts = leases(anew, 8, 1)
    assert flat(numbers(part) for part in parts) == list(range(8, 16))


def test_nothing_is_leased_before_all_ranks_have_asked(open_stream):
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


@pytest.mark.parametrize("ended", ["", "cleared", "dropped"])
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
        if ended == "cleared":
            maker.clear()
        elif ended == "dropped":
            maker.drop_group()
        fill(maker, world)
        assert flat(numbers(each.result(12)) for each in waiting) == list(range(world))
        assert time.monotonic() - began < 4  # no rank looked because its time was up


def test_the_next_steps_may_be_taken_before_this_one_is_acknowledged(open_stream):
    ranks = [open_stream(), open_stream()]
    fill(ranks[0], 2 * MOST_STEPS + 4)
    held = [leases(ranks, 2, step) for step in range(MOST_STEPS)]
    for refused in ask(ranks, 2, MOST_STEPS):
        assert isinstance(refused, ConfigError)
        assert f"{MOST_STEPS} steps, from step 0 on" in str(refused)
    for part in held[3] + held[0]:
        part.ack()
    audit(ranks[0])
    parts = leases(ranks, 2, MOST_STEPS)
    assert [numbers(part) for part in parts] == [[2 * MOST_STEPS], [2 * MOST_STEPS + 1]]
    for refused in ask(ranks, 2, MOST_STEPS + 1):
        assert "from step 1 on" in str(refused)
    for part in ask(ranks, 2, 3):
        assert isinstance(part, WrongStep)
    for part in itertools.chain(*held[1:3], *held[4:], parts):
        part.ack()
    assert ranks[0].stats().ledger.acked == 2 * MOST_STEPS + 2


def test_ranks_that_restart_find_their_parts_also_of_steps_that_some_acknowledged(open_stream):
    ranks = [open_stream(lease_ms=100) for _ in range(2)]
    fill(ranks[0], 8)
    parts = leases(ranks, 4, 0)
    expected = [numbers(part) for part in parts]
    parts[0].ack()
    for each in ranks:
        kill_consumer(each)
    other = open_stream(lease_ms=100)
    other.join_group()
    time.sleep(0.3)  # a heartbeat that takes leases over leaves these alone
    ranks = [open_stream(), open_stream()]
    again = leases(ranks, 4, 0)
    assert [numbers(part) for part in again] == expected
    again[1].ack()
    assert ranks[0].stats().ledger.acked == 0
    again[0].ack()
    assert ranks[0].stats().ledger.acked == 4
    assert [numbers(part) for part in leases(ranks, 4, 1)] == [[4, 6], [5, 7]]


def test_a_rank_that_starts_at_a_step_acknowledges_the_steps_before(open_stream):
    ranks = [open_stream(), open_stream()]
    fill(ranks[0], 8)
    for step in range(2):
        for rank, part in enumerate(leases(ranks, 4, step)):
            if rank == 0 or step == 0:
                part.ack()
    for each in ranks:  # rank 1 between its checkpoint and its acknowledgement of step 1
        kill_consumer(each)
    ranks = [open_stream(), open_stream()]
    fill(ranks[0], 4, first=8)
    assert [numbers(part) for part in leases(ranks, 4, 2)] == [[8, 10], [9, 11]]
    assert ranks[0].stats().ledger.acked == 8


def test_a_rank_that_starts_at_an_impossible_step_acknowledges_nothing(open_stream):
    ranks = [open_stream(), open_stream()]
    fill(ranks[0], 4)
    first, second = leases(ranks, 4, 0)
    first.ack()
    kill_consumer(ranks[1])
    ranks[1] = open_stream()
    with pytest.raises(WrongStep, match="Take step 1"):
        take(ranks[1], 1, 2, 9, 4)
    assert take(ranks[1], 1, 2, 0, 4).ids == second.ids
    assert ranks[0].stats().ledger.acked == 0


def test_a_step_that_is_done_or_not_the_next_is_refused(open_stream):
    ranks = [open_stream(), open_stream()]
    fill(ranks[0], 8)
    for step in (7, 8):  # the first step may have any number
        for part in leases(ranks, 2, step):
            part.ack()
    for step, following in ((8, 9), (3, 9), (10, 9), (99, 9)):
        for error in ask(ranks, 2, step):
            assert isinstance(error, WrongStep)
            assert (error.step, error.next_step, error.task) == (step, following, "math")
    assert [numbers(part) for part in leases(ranks, 2, 9)] == [[4], [5]]


def test_a_short_stream_ends_all_ranks_at_the_same_step(open_stream):
    ranks = [open_stream() for _ in range(3)]
    fill(ranks[0], 8)
    for part in leases(ranks, 6, 0):
        part.ack()
    for error in ask(ranks, 6, 1, timeout=0.3):
        assert isinstance(error, BatchTimeout)
        assert (error.wanted, error.available, error.missing_ranks) == (6, 2, ())
        assert "2 of 6" in str(error)
        assert "math" in str(error)
        assert "Of 8 groups put: 6 are acknowledged." in str(error)
        assert (error.fates["put_ever"], error.fates["leased_by_ranks"]) == (8, 0)
    audit(ranks[0])
    assert len(ranks[0]) == 2
    fill(ranks[0], 4, first=8)
    assert [numbers(part) for part in leases(ranks, 6, 1)] == [[6, 9], [7, 10], [8, 11]]


def test_ranks_that_do_not_ask_are_named(open_stream):
    ranks = [open_stream() for _ in range(3)]
    fill(ranks[0], 6)
    with ThreadPoolExecutor(2) as pool:
        asked = [
            pool.submit(ranks[rank].take, 6, rank=rank, world_size=3, step=0, timeout=limit)
            for rank, limit in ((0, 0.2), (2, 30))
        ]
        for each in asked:
            with pytest.raises(BatchTimeout, match="Ranks 1 did not ask") as caught:
                each.result(30)
            assert caught.value.missing_ranks == (1,)
            assert caught.value.available == 6
    assert len(leases(ranks, 6, 0)) == 3


def test_at_the_end_of_data_parts_are_smaller_and_equal(open_stream):
    ranks = [open_stream(), open_stream()]
    fill(ranks[0], 5)
    parts = leases(ranks, 8, 0, timeout=0.2, at_least=3)
    assert [numbers(part) for part in parts] == [[0, 2], [1, 3]]
    audit(ranks[0])
    assert len(ranks[0]) == 1
    for part in parts:
        part.ack()
    for error in ask(ranks, 8, 1, timeout=0.1, at_least=1):
        assert isinstance(error, BatchTimeout)
        assert error.wanted == 2


@pytest.mark.long
def test_a_rank_that_dies_ends_all_ranks_at_the_same_step(open_stream):
    ranks = [open_stream(lease_ms=300) for _ in range(3)]
    fill(ranks[0], 9)
    for part in leases(ranks, 3, 4):
        part.ack()
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(take, ranks[rank], rank, 3, 5, 3) for rank in (0, 2)]
        time.sleep(0.1)
        kill_consumer(ranks[1])
        for each in waiting:
            with pytest.raises(RankLost, match="ranks 1 died or left before step 5") as caught:
                each.result(4)
            assert (caught.value.step, caught.value.ranks) == (5, (1,))
    audit(ranks[0])
    ranks[1] = open_stream()
    assert [numbers(part) for part in leases(ranks, 3, 5)] == [[3], [4], [5]]


def test_a_rank_that_was_silent_still_acknowledges_and_goes_on(open_stream):
    ranks = [open_stream(lease_ms=300), open_stream(lease_ms=300)]
    fill(ranks[0], 8)
    first, second = leases(ranks, 2, 0)
    first.ack()
    kill_consumer(ranks[1])  # it pauses after its step
    with pytest.raises(RankLost):
        take(ranks[0], 0, 2, 1, 2)
    second.ack()
    audit(ranks[0])
    assert ranks[0].stats().ledger.acked == 2
    for step in (1, 2):
        for part in leases(ranks, 2, step):
            part.ack()
    assert ranks[0].stats().ledger.acked == 6


def test_a_rank_that_was_silent_acknowledges_nothing_if_its_part_was_given_again(open_stream):
    ranks, again = [open_stream(), open_stream()], open_stream()
    fill(ranks[0], 8)
    first, second = leases(ranks, 2, 0)
    first.ack()
    for holder in (ranks[1], again):  # the process that has replaced it dies too
        kill_consumer(holder)
        with pytest.raises(RankLost):
            take(ranks[0], 0, 2, 1, 2)
        if holder is ranks[1]:
            assert take(again, 1, 2, 0, 2).ids == second.ids
    with pytest.raises(LeaseLost, match="another process has taken rank 1 over"):
        second.ack()
    assert ranks[0].stats().ledger.acked == 0


def test_a_rank_whose_silent_job_has_ended_learns_it(open_stream):
    ranks, other = [open_stream(), open_stream()], open_stream()
    fill(ranks[0], 4)
    part = leases(ranks, 2, 0)[1]
    for rank in ranks:
        kill_consumer(rank)
    other.take(4, timeout=0).ack()  # requeues the parts of ranks that are all dead
    with pytest.raises(
        LeaseLost, match=r"rank 1 was silent for longer than lease_ms.* heartbeat: \d+\.\d s"
    ):
        part.ack()


def test_many_ranks_take_and_lose_one(open_stream):
    ranks = [open_stream() for _ in range(20)]
    fill(ranks[0], 60)
    for step in range(2):
        parts = leases(ranks, 20, step)
        assert [numbers(part) for part in parts] == [[20 * step + rank] for rank in range(20)]
        for part in parts:
            part.ack()
    kill_consumer(ranks[7])
    with ThreadPoolExecutor(18) as pool:
        waiting = [
            pool.submit(take, each, rank, 20, 2, 20)
            for rank, each in enumerate(ranks)
            if rank not in (7, 11)
        ]
        for each in waiting:
            with pytest.raises(RankLost) as caught:
                each.result(10)
            assert (caught.value.step, caught.value.ranks) == (2, (7,))
    with pytest.raises(RankLost):  # a rank that asks later gets the error too, once
        take(ranks[11], 11, 20, 2, 20)
    ranks[7] = open_stream()
    assert [numbers(part) for part in leases(ranks, 20, 2)] == [[40 + rank] for rank in range(20)]


def test_a_part_is_acknowledged_with_the_take_of_the_next(open_stream):
    stream = open_stream()
    fill(stream, 4)
    lease = stream.take(2, rank=0, world_size=1, step=0, timeout=0)
    following = stream.take(2, rank=0, world_size=1, step=1, timeout=0, ack=lease)
    assert stream.stats().ledger.acked == 2
    following.ack()


def test_a_part_whose_lease_is_dropped_is_kept(open_stream):
    stream = open_stream(lease_ms=100)
    fill(stream, 4)
    ids = stream.take(2, rank=0, world_size=1, step=0, timeout=0).ids
    gc.collect()
    time.sleep(0.2)
    with stream.take(2, rank=0, world_size=1, step=0, timeout=0) as lease:
        assert lease.ids == ids
    assert stream.stats().ledger.acked == 2


def test_a_rank_that_leaves_early_is_lost_too(open_stream):
    ranks = [open_stream(), open_stream()]
    fill(ranks[0], 4)
    for part in leases(ranks, 2, 0):
        part.ack()
    ranks[1].close()
    with pytest.raises(RankLost):
        take(ranks[0], 0, 2, 1, 2)


def test_of_two_processes_with_one_rank_the_older_one_gets_an_error(open_stream):
    ranks = [open_stream(), open_stream()]
    fill(ranks[0], 8)
    old = leases(ranks, 4, 0)[1]
    older, ranks[1] = ranks[1], open_stream()
    new = take(ranks[1], 1, 2, 0, 4)
    assert numbers(new) == numbers(old)
    with pytest.raises(LeaseLost, match="another process has taken rank 1 over"):
        old.ack()
    with pytest.raises(ConfigError, match="another process has taken rank 1 over"):
        take(older, 1, 2, 1, 4)
    new.ack()


def test_ranks_and_other_takes_do_not_share_a_consumer_group(open_stream):
    ranks, other = [open_stream(), open_stream()], open_stream()
    apart = open_stream(group="apart")
    apart.join_group()
    fill(other, 8)
    held = other.take(1, timeout=0)
    for error in ask(ranks, 4, 0, timeout=0.1):
        assert isinstance(error, ConfigError)
        assert "1 group is leased" in str(error)
        assert "group=" in str(error)
    held.release()
    parts = leases(ranks, 4, 0)
    with pytest.raises(ConfigError, match="use another group="):
        other.take(1, timeout=0)
    assert numbers(apart.take(8, timeout=0)) == list(range(8))
    for each in ranks:
        kill_consumer(each)
    assert numbers(other.take(8, timeout=0)) == list(range(8))
    with pytest.raises(LeaseLost):
        parts[0].ack()
    audit(other)


@pytest.mark.long
def test_another_number_of_ranks_starts_anew(open_stream):
    ranks = [open_stream() for _ in range(3)]
    fill(ranks[0], 12)
    for part in leases(ranks, 6, 0):
        part.ack()
    leases(ranks, 6, 1)
    fewer = [open_stream(lease_ms=300) for _ in range(2)]
    for error in ask(fewer, 6, 1, timeout=0.1):
        assert isinstance(error, ConfigError)
        assert "live ranks hold steps (0, 1, 2 of 3): stop them" in str(error)
    with ThreadPoolExecutor(2) as pool:  # they wait for the others to end
        waiting = [pool.submit(take, each, rank, 2, 1, 6) for rank, each in enumerate(fewer)]
        for each in ranks:
            each.close()
        assert [numbers(each.result(30)) for each in waiting] == [[6, 8, 10], [7, 9, 11]]
    assert fewer[0].stats().ledger.acked == 6


def test_another_batch_size_starts_anew(open_stream):
    ranks = [open_stream(), open_stream()]
    fill(ranks[0], 8)
    leases(ranks, 4, 0)
    for each in ranks:
        kill_consumer(each)
    ranks = [open_stream(), open_stream()]
    assert [numbers(part) for part in leases(ranks, 6, 0)] == [[0, 2, 4], [1, 3, 5]]


@pytest.mark.long
def test_ranks_that_ask_for_different_batches_get_an_error(open_stream):
    ranks = [open_stream(), open_stream()]
    fill(ranks[0], 8)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(ranks[0].take, 4, rank=0, world_size=2, step=0, timeout=0.5)
        time.sleep(0.1)
        with pytest.raises(ConfigError, match="All must ask for the same"):
            ranks[1].take(6, rank=1, world_size=2, step=0, timeout=0.1)
        with pytest.raises(BatchTimeout):
            first.result(30)


def test_a_part_that_is_released_is_kept_for_its_rank(open_stream):
    ranks = [open_stream(max_deliveries=2), open_stream()]
    fill(ranks[0], 4)
    first, second = leases(ranks, 4, 0)
    expected = numbers(first)
    for _ in range(4):
        first.release()
        kill_consumer(ranks[0])
        ranks[0] = open_stream()
        first = take(ranks[0], 0, 2, 0, 4)
        assert numbers(first) == expected
    with pytest.raises(ConfigError, match="ends as a whole"):
        first.ack(first.ids[:1])
    first.ack()
    second.ack()
    assert ranks[0].stats().ledger.acked == 4


def test_groups_that_are_rejected_or_expired_leave_at_once(open_stream, pages):
    pages(failed=3)
    ranks = [open_stream(), open_stream()]
    fill(ranks[0], 8)
    first, second = leases(ranks, 8, 0)
    first.reject("nan loss", first.ids[:1])
    first.expire(first.ids[:1])
    audit(ranks[0])
    ledger = ranks[0].stats().ledger
    assert (ledger.dead, ledger.expired, ledger.leased) == (1, 1, 6)
    kill_consumer(ranks[0])
    ranks[0] = open_stream()
    first = take(ranks[0], 0, 2, 0, 8)
    assert numbers(first) == [4, 6]
    first.ack()
    second.reject("all of it")
    ledger = ranks[0].stats().ledger
    assert (ledger.acked, ledger.dead, ledger.expired, ledger.leased) == (2, 5, 1, 0)
    with pytest.raises(BatchTimeout):
        ranks[0].take(2, rank=0, world_size=2, step=1, timeout=0)


@pytest.mark.parametrize("how", ["reject", "expire"])
def test_groups_that_leave_while_an_earlier_step_is_ended_in_pages_take_no_others_along(
    open_stream, pages, how
):
    pages(ended=2)
    ranks = [open_stream() for _ in range(2)]
    fill(ranks[0], 18)
    first, second = leases(ranks, 12, 0), leases(ranks, 6, 1)
    first[0].ack()
    # the other rank is killed after a page
    seqs = tuple(map(str, first[1].ids))
    ended = FinishPart("default", ranks[1].consumer, 1, 0, "ack", seqs)
    assert ranks[1]._task.store.call(ended).more
    [out, *others] = second[0].ids
    if how == "reject":
        second[0].reject("bad", ids=[out])
    else:
        second[0].expire(ids=[out])
    assert second[0].ids == tuple(others)
    for lease in second:
        lease.ack()
    ledger = ranks[0].stats().ledger
    assert (ledger.acked, ledger.dead + ledger.expired, ledger.waiting) == (17, 1, 0)


def test_misfits_become_dead_letters_and_the_part_is_kept(open_stream):
    ranks = [open_stream(), open_stream()]
    odd = numbered(4, advantages=torch.zeros(2))
    ranks[0].put_many([[odd if n == 4 else numbered(n)] for n in range(8)])
    first, second = leases(ranks, 8, 0)
    with pytest.raises(ValueError, match="batch"), first:
        first.batch()
    with take(ranks[0], 0, 2, 0, 8) as again:
        assert numbers(again) == [0, 2, 6]
        again.batch()
    second.ack()
    ledger = ranks[0].stats().ledger
    assert (ledger.acked, ledger.dead) == (7, 1)


def test_a_step_that_fails_too_often_is_formed_anew(open_stream):
    ranks = [open_stream(max_deliveries=2), open_stream()]
    fill(ranks[0], 6)
    parts = leases(ranks, 4, 0)
    with pytest.raises(ZeroDivisionError), parts[0]:
        raise ZeroDivisionError
    again = take(ranks[0], 0, 2, 0, 4)
    assert numbers(again) == [0, 2]
    with pytest.raises(ZeroDivisionError), again:
        raise ZeroDivisionError
    audit(ranks[0])
    assert ranks[0].stats().ledger.dead == 2
    with pytest.raises(LeaseLost, match="formed anew"):
        parts[1].ack()
    assert [numbers(part) for part in leases(ranks, 4, 0)] == [[1, 4], [3, 5]]


def test_a_part_that_kills_its_rank_again_and_again_becomes_dead_letters(open_stream):
    ranks = [open_stream(max_deliveries=3), open_stream()]
    fill(ranks[0], 8)
    leases(ranks, 4, 0)
    ahead = leases(ranks, 2, 1)
    for _ in range(2):
        kill_consumer(ranks[1])
        ranks[1] = open_stream()
        assert numbers(take(ranks[1], 1, 2, 0, 4)) == [1, 3]
    kill_consumer(ranks[1])
    ranks[1] = open_stream()
    with pytest.raises(LeaseLost, match="formed anew"):  # rank 0 is still busy with its part
        take(ranks[1], 1, 2, 0, 4)
    assert [numbers(part) for part in leases(ranks, 4, 0)] == [[0, 4], [2, 5]]
    assert [letter.failed_deliveries for letter in ranks[0].dead_letters()] == [3, 3]
    with pytest.raises(LeaseLost):
        ahead[0].ack()
    assert [numbers(part) for part in leases(ranks, 2, 1)] == [[6], [7]]


def test_groups_that_cannot_be_decoded_make_a_part_smaller(open_stream):
    ranks = [open_stream(), open_stream()]
    garbage = EncodedGroup(b"\xff" * 20, 1, None, Status.COMPLETED)
    ranks[0]._producer.put(PutBatch((garbage,)))
    fill(ranks[0], 3)
    parts = leases(ranks, 4, 0, balance="tokens")
    assert sorted(len(part) for part in parts) == [1, 2]
    for part in parts:
        part.ack()
    ledger = ranks[0].stats().ledger
    assert (ledger.acked, ledger.dead) == (3, 1)
    ranks[0]._producer.put(PutBatch((garbage,)))
    fill(ranks[0], 1)
    bad, good = ask(ranks, 2, 1)
    assert isinstance(bad, DecodeError)
    assert isinstance(good, Lease)
    good.ack()
    assert ranks[0].stats().ledger.dead == 2
    assert isinstance(ask(ranks, 2, 1)[0], WrongStep)


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
    found = [numbers(part) for part in parts]
    for each in ranks:
        kill_consumer(each)
    ranks = [open_stream(), open_stream()]
    assert [numbers(part) for part in leases(ranks, 8, 0, balance="tokens")] == found


@pytest.mark.long
def test_a_batch_that_was_leased_and_not_dealt_is_dealt_by_another_take(open_stream, monkeypatch):
    ranks = [open_stream(), open_stream()]
    fill(ranks[0], 6)

    def die(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(forming, "deal", die)
    with ThreadPoolExecutor(2) as pool:
        waiting = [
            pool.submit(each.take, 4, rank=rank, world_size=2, step=0, timeout=20)
            for rank, each in enumerate(ranks)
        ]
        while not any(each.done() for each in waiting):
            time.sleep(0.01)
        monkeypatch.undo()
        assert audit(ranks[0])["default"].leased.keys() == {1, 2, 3, 4}
        (dead,) = (rank for rank, each in enumerate(waiting) if each.done())
        kill_consumer(ranks[dead])
        with pytest.raises(RankLost):
            waiting[1 - dead].result(30)
        assert isinstance(waiting[dead].exception(), KeyboardInterrupt)
    assert audit(ranks[0])["default"].leased == {}
    ranks[dead] = open_stream()
    assert [numbers(part) for part in leases(ranks, 4, 0)] == [[0, 2], [1, 3]]


def test_a_take_that_arrives_after_its_attempt_leases_nothing(open_stream, monkeypatch):
    ranks, others = [open_stream(), open_stream()], open_stream()
    fill(ranks[0], 8)
    late: list[Callable[[], TakeReply]] = []

    def noted(send, call, **options):
        if isinstance(call, Take):
            late.append(partial(send, call, **options))
        return send(call, **options)

    for each in ranks:
        store = each._task.store
        monkeypatch.setattr(store, "call", partial(noted, store.call))
    for error in ask(ranks, 16, 0, timeout=0.1):
        assert isinstance(error, BatchTimeout)
    assert late[0]().outcome == "late"
    parts = leases(ranks, 4, 0)
    assert late[-1]().outcome == "late"
    assert audit(ranks[0])["default"].leased.keys() == {1, 2, 3, 4}
    for part in parts:
        part.ack()
    assert late[-1]().outcome == "late"
    for each in ranks:
        each.close()
    others.take(1, timeout=0).ack()  # there are no ranks any more
    assert late[-1]().outcome == "late"
    assert audit(others)["default"].leased == {}


@pytest.mark.long
def test_a_rank_whose_time_is_up_forms_the_step_itself(open_stream, monkeypatch):
    ranks = [open_stream(), open_stream()]
    fill(ranks[0], 4)

    def hang(*_, **__):
        raise RuntimeError

    monkeypatch.setattr(ranks[1]._ranks, "_form", hang)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(ranks[0].take, 4, rank=0, world_size=2, step=0, timeout=1)
        time.sleep(0.2)
        with pytest.raises(RuntimeError):
            take(ranks[1], 1, 2, 0, 4)
        assert numbers(first.result(30)) == [0, 2]
    assert numbers(take(ranks[1], 1, 2, 0, 4)) == [1, 3]


def test_orders_queries_and_statuses_are_those_of_other_takes(open_stream):
    ranks = [open_stream(order="lifo", tags=["score"]) for _ in range(2)]
    for n in range(6):
        ranks[0].put([numbered(n, tags={"score": n})])
    ranks[0].put_many([[numbered(n)] for n in (10, 11)], status=Status.ABORTED)
    parts = leases(ranks, 4, 0, where={"score_lt": 4})
    assert [numbers(part) for part in parts] == [[3, 1], [2, 0]]
    aborted = leases(ranks, 2, 1, status=Status.ABORTED)
    assert [numbers(part) for part in aborted] == [[11], [10]]
    for part in parts + aborted:
        part.ack()
    for error in ask(ranks, 4, 2, timeout=0.1, where={"score_lt": 4}):
        assert isinstance(error, BatchTimeout)
        assert error.available == 0


def test_groups_that_are_too_stale_expire_before_a_step_is_formed(open_stream):
    ranks = [open_stream(order="stalest", max_staleness=2) for _ in range(2)]
    for version in (1, 2, 5, 6):
        ranks[0].put([numbered(version)], policy_version=version)
    ranks[0].advance(7)
    parts = leases(ranks, 2, 0)
    assert [numbers(part) for part in parts] == [[5], [6]]
    for part in parts:
        part.ack()
    assert ranks[0].stats().ledger.expired == 2


def test_groups_that_are_read_again_are_in_later_steps(open_stream):
    ranks = [open_stream(max_reads=2) for _ in range(2)]
    fill(ranks[0], 2)
    for step in range(2):
        parts = leases(ranks, 2, step)
        assert [numbers(part) for part in parts] == [[0], [1]]
        for part in parts:
            part.ack()
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


def test_ranks_end_with_their_task_and_their_consumer_group(open_stream):
    ranks = [open_stream(), open_stream()]
    fill(ranks[0], 8)

    def keys_of_ranks():
        keys = ranks[0]._task.store.client.execute("KEYS", "*")
        return [key for key in keys if ranks[0].namespace.encode() in key and b":rank" in key]

    for end in (ranks[0].drop_group, ranks[0].clear):
        parts = leases(ranks, 4, 3)
        assert keys_of_ranks()
        end()
        with pytest.raises(LeaseLost):
            parts[0].ack()
        assert not keys_of_ranks()
        fill(ranks[0], 8)
    assert len(leases(ranks, 4, 0)) == 2


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


WORLD, STEPS, COUNT = 3, 10, 6


class Rank:
    """One rank of a random run: it dies, is killed and starts again, and takes ahead."""

    def __init__(self, rank: int, open_stream: Opener, seed: int) -> None:
        self.rank = rank
        self.open_stream = open_stream
        self.dice = random.Random(seed)
        self.stream = open_stream(lease_ms=1000)
        self.got: dict[int, list[list[int]]] = {}
        self.lost: list[tuple[int, int]] = []

    def run(self) -> None:
        step, held = 0, list[Lease]()
        while step < STEPS or held:
            if step < STEPS and len(held) < self.dice.choice((1, 2)):
                try:
                    lease = self.stream.take(
                        COUNT, rank=self.rank, world_size=WORLD, step=step, timeout=20
                    )
                except RankLost as error:
                    self.lost.append((error.step, step))
                    continue
                self.got.setdefault(step, []).append(numbers(lease))
                held.append(lease)
                step += 1
                continue
            if self.dice.random() < 0.25:
                self.start_again()
                step -= len(held)
                held = []
                continue
            held.pop(0).ack()

    def start_again(self) -> None:
        if self.dice.random() < 0.7:
            kill_consumer(self.stream)
        else:
            self.stream.close()
        self.stream = self.open_stream(lease_ms=1000)


def test_every_group_goes_to_one_rank_of_one_step_whatever_dies(open_stream):
    watcher = open_stream(max_deliveries=1000)
    fill(watcher, STEPS * COUNT)
    ranks = [Rank(rank, open_stream, seed=rank) for rank in range(WORLD)]
    ended = threading.Event()

    def watch():
        while not ended.wait(0.05):
            audit(watcher)

    with ThreadPoolExecutor(WORLD + 1) as pool:
        watching = pool.submit(watch)
        try:
            for running in [pool.submit(rank.run) for rank in ranks]:
                running.result(60)
        finally:
            ended.set()
        watching.result(10)
    given = []
    for rank in ranks:
        assert all(named == asked for named, asked in rank.lost)
        assert sorted(rank.got) == list(range(STEPS))
        for takes in rank.got.values():
            assert all(each == takes[0] for each in takes)
            assert len(takes[0]) == COUNT // WORLD
            given += takes[0]
    assert sorted(given) == list(range(STEPS * COUNT))
    ledger = watcher.stats().ledger
    assert (ledger.acked, ledger.leased, ledger.waiting) == (STEPS * COUNT, 0, 0)
