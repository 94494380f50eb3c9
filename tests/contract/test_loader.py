"""ExperienceLoader: batches are there when the step ends, and nothing is lost by taking ahead."""

from __future__ import annotations

import gc
import logging
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import redrb
from redrb import BatchTimeout, ConfigError, Experience, ExperienceStream, LeaseLost
from redrb.connection.deadline import Deadline
from redrb.connection.outage import Outage
from redrb.errors import RecordError, StoreUnavailable
from redrb.stream.feeding import ExperienceLoader
from redrb.stream.take.calls import Beat
from redrb.stream.take.read_ahead import ReadAhead
from tests import warm
from tests.audit import audit, kill_consumer
from tests.conftest import REAL
from tests.samples import numbered, numbers
from tests.scenes import holds_in_a_child, silence, until

pytestmark = pytest.mark.long  # the same requests as test_stream*.py

ROOT = Path(__file__).parents[2]


@pytest.fixture
def stream(client, namespace):
    with ExperienceStream(client, "math", namespace=namespace) as stream:
        yield stream


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    until(lambda: not threads())


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "redrb-read-ahead"]


def filled(stream: ExperienceStream, count: int) -> ExperienceStream:
    stream.put_many([[numbered(n)] for n in range(count)])
    return stream


def rewards(batch: Experience) -> list[int]:
    return batch.reward.int().tolist()


def ledger(stream: ExperienceStream) -> tuple[int, int, int, int]:
    counts = stream.stats().ledger
    return counts.acked, counts.leased, counts.waiting, counts.dead


def test_a_batch_is_acknowledged_when_the_loop_comes_back(stream):
    filled(stream, 6)
    seen: list[int] = []
    with ExperienceLoader(stream, 2, steps=3, prefetch=1) as loader:
        for batch in loader:
            assert stream.stats().ledger.acked == len(seen)
            assert len(loader.lease) == 2
            seen += rewards(batch)
        assert stream.stats().ledger.acked == 6
        assert seen == list(range(6))
        assert loader.batches == 3
    audit(stream)


def test_each_loop_gives_its_steps(stream):
    filled(stream, 8)
    loader = ExperienceLoader(stream, 1, steps=4)
    assert [rewards(batch) for batch in loader] == [[0], [1], [2], [3]]
    assert [rewards(batch) for batch in loader] == [[4], [5], [6], [7]]
    assert list(ExperienceLoader(stream, 1, steps=0)) == []
    assert ledger(stream) == (8, 0, 0, 0)


def test_it_leases_at_most_prefetch_plus_one_batches(stream):
    filled(stream, 20)
    with ExperienceLoader(stream, 2, prefetch=3) as loader:
        batches = iter(loader)
        next(batches)
        until(lambda: loader.ready == 3)
        assert stream.stats().ledger.leased == 8
        next(batches)
        until(lambda: loader.ready == 3)
        time.sleep(0.02)
        assert stream.stats().ledger.leased == 8
    assert ledger(stream) == (2, 0, 18, 0)
    audit(stream)


@pytest.mark.parametrize("leave", ["break", "forget", "close", "new loop"])
def test_batches_that_were_not_read_are_requeued_unharmed(client, namespace, leave):
    stream = filled(ExperienceStream(client, "math", namespace=namespace, max_deliveries=1), 10)
    loader = ExperienceLoader(stream, 2)
    if leave == "break":
        for _ in loader:
            until(lambda: loader.ready == 2)
            break
    else:
        batches = iter(loader)
        next(batches)
        until(lambda: loader.ready == 2)
        if leave == "forget":
            del batches
            gc.collect()
        elif leave == "new loop":
            assert next(iter(loader)) is not None
            assert next(batches, None) is None
    if leave in ("break", "forget"):
        until(lambda: stream.stats().ledger.leased == 2)
        assert numbers(loader.lease) == [0, 1]
    loader.close()
    assert ledger(stream) == (0, 0, 10, 0)
    assert numbers(stream.take(10, timeout=0)) == list(range(10))
    stream.close()


def test_a_lease_may_be_ended_in_the_loop(stream):
    filled(stream, 6)
    with ExperienceLoader(stream, 2, steps=3) as loader:
        for number, _ in enumerate(loader):
            if number == 0:
                loader.lease.reject("nan loss")
            elif number == 1:
                loader.lease.release([loader.lease.ids[0]])
    assert ledger(stream) == (3, 0, 1, 2)


def test_an_exception_in_the_block_counts_against_the_last_batch_only(client, namespace):
    stream = filled(ExperienceStream(client, "math", namespace=namespace, max_deliveries=1), 8)
    with pytest.raises(ZeroDivisionError), ExperienceLoader(stream, 2) as loader:
        for number, _ in enumerate(loader):
            until(lambda: loader.ready == 2)
            if number == 1:
                raise ZeroDivisionError
    assert ledger(stream) == (2, 0, 4, 2)
    stream.close()


def test_without_acknowledging_leases_are_the_callers(stream):
    filled(stream, 6)
    held = []
    with ExperienceLoader(stream, 2, steps=2, acknowledge=False) as loader:
        for _ in loader:
            held.append(loader.lease)
    assert ledger(stream) == (0, 4, 2, 0)
    for lease in held:
        lease.ack()
    assert ledger(stream) == (4, 0, 2, 0)


def test_the_end_of_data_comes_after_the_batches_before_it(stream):
    filled(stream, 5)
    seen = []
    loader = ExperienceLoader(stream, 2, timeout=0.05, at_least=1)
    with pytest.raises(BatchTimeout) as caught, loader:
        for batch in loader:
            seen.append(rewards(batch))
    assert seen == [[0, 1], [2, 3], [4]]
    assert caught.value.wanted == 1
    assert ledger(stream) == (5, 0, 0, 0)


def test_a_step_longer_than_the_timeout_ends_nothing(stream):
    filled(stream, 2)
    seen = []
    with ExperienceLoader(stream, 2, timeout=0.4, steps=2) as loader:
        for batch in loader:
            seen.append(rewards(batch))
            if len(seen) == 1:
                time.sleep(0.6)  # a step; nothing comes meanwhile
                stream.put_many([[numbered(n)] for n in (2, 3)])
    assert seen == [[0, 1], [2, 3]]


def test_misfits_are_an_error_in_their_place(client, namespace, stream):
    filled(stream, 3)
    # put without the check of fields, so that takes find it
    with ExperienceStream(client, "math", namespace=namespace, checks=["values"]) as unchecked:
        unchecked.put(numbered(3, sequences=torch.tensor([1, 2, 3], dtype=torch.int32)))
    stream.put_many([[numbered(n)] for n in range(4, 7)])
    seen = []
    loader = ExperienceLoader(stream, 3, timeout=5)
    with pytest.raises(RecordError) as caught:
        for batch in loader:
            seen.append(rewards(batch))
    assert seen == [[0, 1, 2]]
    assert len(caught.value.ids) == 1
    loader.close()
    assert ledger(stream) == (3, 0, 3, 1)
    assert [rewards(batch) for batch in ExperienceLoader(stream, 3, steps=1)] == [[4, 5, 6]]


def test_batches_have_the_tensors_that_are_named(stream):
    filled(stream, 4)
    with ExperienceLoader(stream, 2, steps=2, tensors=["reward"]) as loader:
        for batch in loader:
            assert batch.sequences is batch.values is None
            assert len(rewards(batch)) == 2
    assert stream.stats().ledger.acked == 4
    with pytest.raises(ConfigError, match=r"tensors='reward': give a list"):
        ExperienceLoader(stream, 2, tensors="reward")
    filled(stream, 1)
    with (
        pytest.raises(ConfigError, match="no group of this batch has rewards"),
        ExperienceLoader(stream, 1, steps=1, timeout=5, tensors=["rewards"]) as loader,
    ):
        list(loader)
    assert ledger(stream) == (4, 0, 1, 0)


def test_a_lost_lease_is_an_error_when_the_loop_comes_back(stream):
    filled(stream, 6)
    with ExperienceLoader(stream, 2, prefetch=1) as loader:
        batches = iter(loader)
        next(batches)
        until(lambda: loader.ready == 1)
        kill_consumer(stream)
        stream._task.store.call(Beat("default", "another", 1000, stream.incarnation), b"")
        with pytest.raises(LeaseLost):
            next(batches)
        assert next(batches, None) is None
    assert stream.stats().ledger.waiting == 6


def test_close_ends_a_wait_for_a_batch(stream):
    loader = ExperienceLoader(stream, 2)
    batches = iter(loader)
    until(lambda: stream.stats().consumers_waiting == 1)
    began = time.monotonic()
    loader.close()
    assert time.monotonic() - began < 30
    assert not threads()
    assert next(batches, None) is None


def test_stop_ends_a_loop_that_waits(stream):
    filled(stream, 2)
    loader = ExperienceLoader(stream, 2)
    threading.Timer(0.2, loader.stop).start()
    assert [rewards(batch) for batch in loader] == [[0, 1]]
    assert ledger(stream) == (2, 0, 0, 0)


def test_waits_are_measured(stream):
    filled(stream, 2)
    began = time.monotonic()
    with ExperienceLoader(stream, 2, steps=2) as loader:
        batches = iter(loader)
        next(batches)

        def put_late():
            until(lambda: not stream.worker.steps.lasted_s)  # the loop asks for the next batch
            time.sleep(0.3)
            filled(stream, 2)

        put = threading.Thread(target=put_late)
        put.start()
        next(batches)
        took_s = time.monotonic() - began
        assert 0.2 < loader.last_wait_for_batch_s <= loader.wait_for_batch_s <= took_s
        assert next(batches, None) is None
    put.join()


def test_an_outage_is_an_error_after_the_batches_before_it(stream, monkeypatch):
    filled(stream, 4)
    take = stream._taker.take

    def broken(*arguments):
        if stream.stats().ledger.waiting == 0:
            raise StoreUnavailable("gone", where="here")
        return take(*arguments)

    monkeypatch.setattr(stream._taker, "take", broken)
    seen = []
    with pytest.raises(StoreUnavailable), ExperienceLoader(stream, 2, timeout=0.7) as loader:
        for batch in loader:
            seen.append(rewards(batch))
    assert seen == [[0, 1], [2, 3]]


@pytest.mark.parametrize("timeout", [None, 20])
def test_an_outage_shorter_than_the_timeout_ends_no_loop(stream, monkeypatch, caplog, timeout):
    filled(stream, 4)
    take, failures = stream._taker.take, iter([False, True, True])

    def broken(*arguments):
        if next(failures, False):
            raise StoreUnavailable("gone", where="here")
        return take(*arguments)

    monkeypatch.setattr(stream._taker, "take", broken)
    with ExperienceLoader(stream, 2, steps=2, timeout=timeout) as loader:
        assert [rewards(batch) for batch in loader] == [[0, 1], [2, 3]]
    assert caplog.text.count("a batch cannot be taken ahead yet: gone") == 1
    assert caplog.text.count("s: a batch cannot be taken ahead yet") == 1  # it is over


def test_a_loop_that_waits_for_redis_is_stopped_at_once(stream, monkeypatch):
    def away(*arguments):
        raise StoreUnavailable("gone", where="here")

    monkeypatch.setattr(stream._taker, "take", away)
    loader = ExperienceLoader(stream, 2)
    timer = threading.Timer(0.3, loader.stop)
    batches, began = iter(loader), time.monotonic()
    timer.start()
    assert next(batches, None) is None
    assert time.monotonic() - began < 30
    timer.join()
    loader.close()


def test_closing_while_redis_is_away_leaves_batches_to_the_heartbeat(stream, monkeypatch, caplog):
    filled(stream, 6)
    loader = ExperienceLoader(stream, 2, prefetch=1)
    batches = iter(loader)
    next(batches)
    until(lambda: loader.ready == 1)
    end_request = stream._consumer.end_request

    def away(*arguments, **options):
        raise StoreUnavailable("gone", where="here")

    monkeypatch.setattr(stream._consumer, "end_request", away)
    with caplog.at_level(logging.WARNING, "redrb"):
        loader.stop()
        until(lambda: not threads())
    assert "requeued later" in caplog.text
    silence(stream)
    monkeypatch.setattr(stream._consumer, "end_request", end_request)
    stream._consumer.beat()
    assert ledger(stream) == (0, 2, 4, 0)
    loader.close()


def test_ranks_count_steps_up(stream, monkeypatch):
    filled(stream, 8)
    take, steps = stream.take, []

    def ranked(count, *, rank, world_size, step, **options):
        steps.append((rank, world_size, step))
        return take(count, **options)

    monkeypatch.setattr(stream, "take", ranked)
    loader = ExperienceLoader(stream, 2, steps=2, rank=1, world_size=4, first_step=7)
    assert len(list(loader)) == 2
    assert len(list(loader)) == 2
    assert steps == [(1, 4, step) for step in (7, 8, 9, 10)]


def test_ranks_get_the_same_number_of_batches(client, namespace):
    seen: dict[int, list[list[int]]] = {}

    def train(rank):
        with (
            ExperienceStream(client, "math", namespace=namespace) as one,
            ExperienceLoader(one, 4, rank=rank, world_size=2, steps=4, timeout=20) as loader,
        ):
            seen[rank] = [rewards(batch) for batch in loader]

    with ExperienceStream(client, "math", namespace=namespace) as stream:
        filled(stream, 20)
        ranks = [threading.Thread(target=train, args=(rank,)) for rank in range(2)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        for step in range(4):
            assert sorted(seen[0][step] + seen[1][step]) == list(range(4 * step, 4 * step + 4))
        assert stream.stats().ledger.acked == 16


def test_arguments_are_checked(stream):
    for options in ({"prefetch": -1}, {"at_least": 3}, {"timeout": -1}, {"device": "nonsense"}):
        with pytest.raises(ConfigError):
            ExperienceLoader(stream, 2, **options)
    with pytest.raises(ConfigError, match="no redrb"):
        ExperienceLoader("math", 2)


def test_batches_are_padded_on_the_side_asked_for(stream):
    stream.put(numbered(0))
    stream.put(numbered(1, sequences=torch.tensor([7, 8, 9, 10])))
    with ExperienceLoader(stream, 2, side="right", pin_memory=True, steps=1) as loader:
        (batch,) = loader
    assert batch.sequences.tolist() == [[1, 2, 3, 0], [7, 8, 9, 10]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_batches_are_copied_beside_the_step(stream):
    filled(stream, 64)
    with ExperienceLoader(stream, 4, device="cuda", pin_memory=True, steps=16) as loader:
        for number, batch in enumerate(loader):
            torch.cuda._sleep(1_000_000)
            assert batch.reward.is_cuda
            assert rewards(batch) == list(range(4 * number, 4 * number + 4))


def test_a_forked_process_cannot_read_its_parents_loop(real_url, namespace):
    with (
        redrb.connect(real_url) as client,
        ExperienceStream(client, "math", namespace=namespace) as stream,
    ):
        filled(stream, 8)
        loader = ExperienceLoader(stream, 2, prefetch=1)
        batches = iter(loader)
        next(batches)
        until(lambda: loader.ready == 1)

        def begins_anew():
            with pytest.raises(ConfigError):
                next(batches)
            loader.close()
            mine = rewards(next(iter(loader)))
            loader.close()
            stream.close()
            return mine == [4, 5]

        assert holds_in_a_child(begins_anew)
        assert rewards(next(batches)) == [2, 3]
        assert ledger(stream)[0] == 2
        loader.close()


ENDS = """
import sys, threading, redrb
from redrb.stream.feeding import ExperienceLoader
stream = redrb.ExperienceStream(redrb.connect(sys.argv[1]), "math", namespace=sys.argv[2])
loader = ExperienceLoader(stream, 2)
batches = iter(loader)
next(batches)
while loader.ready < 2:
    threading.Event().wait(0.01)
"""


def test_a_process_that_ends_requeues_prefetched_batches(server_urls, namespace):
    real_url = server_urls(next(iter(REAL)))
    with (
        redrb.connect(real_url) as client,
        ExperienceStream(client, "math", namespace=namespace) as stream,
    ):
        filled(stream, 8)
        began = time.monotonic()
        command = [sys.executable, "-W", "error", "-c", ENDS, real_url, namespace]
        warm.run(command, check=True, timeout=60, cwd=ROOT)
        assert time.monotonic() - began < 30
        assert stream.stats().ledger.waiting >= 6


@pytest.mark.parametrize("before", [0, 1, 3])
@pytest.mark.parametrize("is_stopped", [False, True])
@pytest.mark.parametrize("error", [ZeroDivisionError, LeaseLost, BatchTimeout, KeyboardInterrupt])
def test_only_outages_and_a_stop_for_the_batch_before_are_passed_over(error, is_stopped, before):
    ahead = object.__new__(ReadAhead)
    ahead._stopped, ahead._overdue, ahead._timeout = False, -1, None
    ahead._untaken = Outage("batches cannot be taken")
    runs: list[Exception | None] = [StoreUnavailable("away", where="here") for _ in range(before)]
    last = error.__new__(error)
    runs += [last, None]

    def take(number, _):
        failure = runs.pop(0)
        if failure is last and is_stopped:
            ahead._stop_take.ask()
        if failure is not None:
            raise failure
        return number

    ahead._take = take
    if error is BatchTimeout and is_stopped:
        assert ahead._leased(7, None, Deadline()) == 7
        return
    with pytest.raises(error) as caught:
        ahead._leased(7, None, Deadline())
    assert caught.value is last
    assert runs == [None]
