"""Batches from several tasks: exact ratios, all or nothing, and errors name tasks that starve."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import redrb
from redrb import BatchTimeout, ConfigError, ExperienceStream, LeaseLost
from redrb.connection import Client, deadline
from redrb.errors import RecordError
from redrb.stream.mixture import Mixture, MixtureLease
from redrb.stream.mixture.mixture import Ratio, Split
from redrb.stream.task.store import TaskStore
from tests import warm
from tests.audit import audit
from tests.samples import numbered, numbers
from tests.scenes import holds_in_a_child, until

ROOT = Path(__file__).parents[2]
WEIGHTS = {"math": 0.7, "code": 0.3}


class Tasks:
    """The two tasks of most tests, and puts into them."""

    def __init__(self, client: Client, namespace: str) -> None:
        self.streams = {
            task: ExperienceStream(client, task, namespace=namespace) for task in WEIGHTS
        }

    def put(self, **counts: int) -> None:
        """Put numbered groups into tasks: from 0 up in math, from 1000 up in code."""
        for task, count in counts.items():
            stream = self.streams[task]
            first = stream.stats().ledger.put + (0 if task == "math" else 1000)
            stream.put_many([[numbered(n)] for n in range(first, first + count)])

    def waiting(self) -> dict[str, int]:
        return {task: len(stream) for task, stream in self.streams.items()}


@pytest.fixture
def tasks(client, namespace):
    tasks = Tasks(client, namespace)
    yield tasks
    for stream in tasks.streams.values():
        audit(stream)
        ledger = stream.stats().ledger
        assert ledger.balanced
        assert ledger.dead == 0
        stream.close()


@pytest.fixture
def mixture(client, namespace, tasks):
    with Mixture(client, WEIGHTS, namespace=namespace) as mixture:
        yield mixture


def assert_exact(taken: dict[str, int], weights: dict[str, Any]) -> None:
    """Each task is less than one group away from its weight times the total."""
    total = sum(taken.values())
    exact = {task: Fraction(repr(weight)) for task, weight in weights.items()}
    for task, share in exact.items():
        behind = share / sum(exact.values()) * total - taken[task]
        assert abs(behind) < 1, f"{task}: {float(behind)} of {taken}"


def tally(lease: MixtureLease) -> Counter[str]:
    return Counter(lease.tasks)


# Ratios


@pytest.mark.parametrize(
    ("weights", "parts"),
    [
        ({"math": 0.7, "code": 0.3}, {"code": 3, "math": 7}),
        ({"code": 3, "math": 7}, {"code": 3, "math": 7}),
        ({"a": Fraction(1, 3), "b": 1}, {"a": 1, "b": 3}),
        ({"a": 1.0}, {"a": 1}),
        ({"a": 10**400, "b": 10**400}, {"a": 1, "b": 1}),
    ],
)
def test_weights_of_any_scale_are_held_exactly(weights, parts):
    ratio = Ratio.of(weights)
    assert ratio.parts == parts
    assert sum(ratio.weights.values()) == pytest.approx(1)


def test_weights_that_are_no_simple_fractions_are_held_as_written():
    weights = {"a": 0.123456789012345, "b": 2**0.5, "c": 1e-300}
    exact = {task: Fraction(repr(weight)) for task, weight in weights.items()}
    ratio = Ratio.of(weights)
    whole = sum(ratio.parts.values())
    for task, weight in exact.items():
        assert Fraction(ratio.parts[task], whole) == weight / sum(exact.values())


@pytest.mark.parametrize("weight", [0, -1, -0.5, float("nan"), float("inf"), "1", None, True, 1j])
def test_a_weight_that_is_no_positive_number_is_refused(weight):
    with pytest.raises(ConfigError, match="task 'code'"):
        Ratio.of({"math": 1, "code": weight})


@pytest.mark.parametrize("weights", [{}, None, ["math"], "math", {"ma:th": 1}, {"": 1}, {3: 1}])
def test_weights_without_valid_task_names_are_refused(weights):
    with pytest.raises(ConfigError):
        Ratio.of(weights)


@settings(max_examples=60, deadline=None)
@given(
    weights=st.lists(st.integers(1, 10**6) | st.floats(1e-3, 1e3), min_size=1, max_size=7),
    counts=st.lists(st.integers(1, 40) | st.integers(1, 2**20), min_size=1, max_size=12),
)
def test_any_takes_in_any_ratio_stay_within_one_group(weights, counts):
    ratio = Ratio.of({f"t{index}": weight for index, weight in enumerate(weights)})
    split, whole = Split(ratio), sum(ratio.parts.values())
    for count in counts:
        shares = split.shares(count)
        assert min(shares.values()) >= 0
        assert sum(shares.values()) == count
        split.keep(shares)
        for task, part in ratio.parts.items():
            assert abs(part * sum(split.taken.values()) - whole * split.taken[task]) < whole


@pytest.mark.parametrize(
    ("parts", "counts"),
    [
        ([50, 5, 50, 50, 5], [5, 1, 2, 5, 1, 2, 3, 3, 1, 1]),
        ([8, 100, 100, 100, 8, 8], [1, 2, 5, 5, 5, 3, 1, 1, 1, 1]),
        ([100, 8, 1, 100, 8, 1, 100, 8], [1, 1, 5, 2, 3, 2, 2, 5, 2, 1]),
    ],
)
def test_takes_that_largest_remainders_would_split_wrongly(parts, counts):
    weights = {f"t{index}": part for index, part in enumerate(parts)}
    split = Split(Ratio.of(weights))
    for count in counts:
        split.keep(split.shares(count))
        assert_exact(split.taken, weights)


# Takes


def test_a_take_is_of_all_tasks_and_one_batch(tasks, mixture):
    tasks.put(math=20, code=20)
    with mixture.take(10, timeout=0) as lease:
        assert len(lease) == lease.samples == 10
        assert tally(lease) == {"math": 7, "code": 3}
        assert numbers(lease.items()) == [1000, 1001, 1002, *range(7)]
        assert [numbers(group) for group in lease.groups()][:4] == [[1000], [1001], [1002], [0]]
        batch = lease.batch()
        assert batch.sequences.shape == (10, 3)
        assert batch.reward.tolist() == [float(n) for n in (1000, 1001, 1002, *range(7))]
        assert lease.sample_tasks == ["code"] * 3 + ["math"] * 7
        assert lease.ids == {"code": (1, 2, 3), "math": tuple(range(1, 8))}
        assert lease.nbytes == sum(part.nbytes for part in lease.parts.values()) > 0
        assert lease.policy_versions == [None] * 10
    assert not lease
    acked = {task: stream.stats().ledger.acked for task, stream in tasks.streams.items()}
    assert acked == {"math": 7, "code": 3}
    assert mixture.taken() == {"code": 3, "math": 7}
    assert mixture.weights == {"code": 0.3, "math": 0.7}


def test_a_batch_pads_samples_of_all_tasks_to_one_length(tasks, mixture):
    long = numbered(5, sequences=torch.arange(6), action_log_probs=torch.zeros(4))
    tasks.streams["code"].put([long, long])
    tasks.put(math=3)
    with mixture.take(3, timeout=0) as lease:
        batch = lease.batch(side="right")
        assert batch.sequences.shape == (4, 6)
        assert batch.action_log_probs.shape == (4, 4)
        assert batch.attention_mask.sum(1).tolist() == [6, 6, 3, 3]
        assert lease.sample_tasks == ["code", "code", "math", "math"]
        assert lease.tasks == ["code", "math", "math"]


def test_the_lease_before_is_acknowledged_first(tasks, mixture):
    tasks.put(math=14, code=6)
    first = mixture.take(10, timeout=0)
    second = mixture.take(10, timeout=0, ack=first)
    assert not first
    with pytest.raises(BatchTimeout):
        mixture.take(10, timeout=0, ack=second)
    assert not second
    assert [stream.stats().ledger.acked for stream in tasks.streams.values()] == [14, 6]


def test_some_groups_or_all_are_acknowledged_or_released(tasks, mixture):
    tasks.put(math=7, code=3)
    lease = mixture.take(10, timeout=0)
    with pytest.raises(ConfigError, match="not in this lease"):
        lease.release({"math": [1], "code": [99]})
    with pytest.raises(ConfigError, match="not in this lease"):
        lease.ack({"nothing": [1]})
    assert len(lease) == 10
    lease.ack({"math": [1, 2]})
    lease.release({"math": [3], "code": [2]})
    assert lease.ids == {"code": (1, 3), "math": (4, 5, 6, 7)}
    assert tasks.waiting() == {"math": 1, "code": 1}
    lease.release()
    assert tasks.waiting() == {"math": 5, "code": 3}
    with pytest.raises(LeaseLost):
        lease.ack()
    with pytest.raises(LeaseLost):
        lease.batch()


def test_misfits_of_one_task_s_batch_reject_no_group_of_another_task(client, namespace):
    tasks = Tasks(client, namespace)
    tasks.put(math=7)
    tasks.streams["code"].put_many([[numbered(1)], [numbered(2, values=torch.zeros(2))]] * 2)
    with Mixture(client, WEIGHTS, namespace=namespace) as mixture:
        with pytest.raises(RecordError), mixture.take(10, timeout=0) as lease:
            lease.parts["code"].batch()
        assert tasks.waiting() == {"math": 7, "code": 4}


# Waiting and starving


def test_a_task_that_starves_is_named_and_nothing_is_taken(tasks, mixture, monkeypatch):
    blocked_s: list[float] = []
    whole = TaskStore.wait_for_wake

    def wait_for_wake(self, *arguments):
        began = time.monotonic()
        try:
            return whole(self, *arguments)
        finally:
            blocked_s.append(time.monotonic() - began)

    monkeypatch.setattr(TaskStore, "wait_for_wake", wait_for_wake)
    tasks.put(math=9, code=2)
    with pytest.raises(BatchTimeout) as caught:
        mixture.take(10, timeout=0.2)
    error = caught.value
    assert (error.task, error.available, error.wanted) == ("code", 2, 3)
    assert (error.fates["put"], error.fates["available"]) == (2, 2)
    assert 0.2 <= error.waited_s < 5
    assert tasks.waiting() == {"math": 9, "code": 2}
    assert mixture.taken() == {"code": 0, "math": 0}
    assert blocked_s  # on a busy machine the time before it is a part of the timeout, too
    tasks.put(code=1)
    lease = mixture.take(10, timeout=0)
    assert numbers(lease.items()) == [1000, 1001, 1002, *range(7)]
    lease.ack()


@pytest.mark.long
def test_shares_leased_before_a_timeout_are_requeued_unharmed(tasks, mixture):
    tasks.put(math=2, code=3)
    for _ in range(7):  # more often than max_deliveries
        with pytest.raises(BatchTimeout) as caught:
            mixture.take(10, timeout=0.02)
        assert (caught.value.task, caught.value.available) == ("math", 2)
    assert tasks.waiting() == {"math": 2, "code": 3}
    assert tasks.streams["code"].stats().ledger.leased == 0
    tasks.put(math=5)
    lease = mixture.take(10, timeout=0)
    assert numbers(lease.items()) == [1000, 1001, 1002, *range(7)]
    lease.ack()


def test_all_tasks_that_starve_are_named(tasks, mixture):
    tasks.put(math=6)
    with pytest.raises(BatchTimeout) as caught:
        mixture.take(10, timeout=0)
    error = caught.value
    assert (error.task, error.available, error.wanted) == ("code, math", 6, 10)
    assert "task 'code': 0 of 3 groups were waiting." in error.__notes__
    assert "task 'math': 6 of 7 groups were waiting." in error.__notes__


def test_a_share_that_exceeds_a_limit_is_an_error_and_not_a_wait(client, namespace):
    with (
        ExperienceStream(client, "math", namespace=namespace, limit=4) as math,
        Mixture(client, WEIGHTS, namespace=namespace) as mixture,
    ):
        math.put(numbered(1))
        mixture._streams["code"].put_many([[numbered(1)]] * 3)
        with pytest.raises(ConfigError, match="at most 4 groups"):
            mixture.take(10)
        assert len(mixture._streams["code"]) == 3


class Waiters:
    """Takes on threads, which end only when they are woken."""

    def __init__(self, tasks: Tasks, pool: ThreadPoolExecutor) -> None:
        self._tasks = tasks
        self._pool = pool

    def start(self, mixture: Mixture, count: int, task: str) -> Future[Counter[str]]:
        """Start a take and return when it waits for groups of `task`."""
        before = self._tasks.streams[task].stats().consumers_waiting
        future = self._pool.submit(self._take, mixture, count)
        stats = self._tasks.streams[task].stats
        until(lambda: stats().consumers_waiting == before + 1)
        return future

    def _take(self, mixture: Mixture, count: int) -> Counter[str]:
        with mixture.take(count, timeout=30) as lease:
            return tally(lease)


@pytest.fixture
def waiters(tasks, only_wakes):
    with ThreadPoolExecutor(8) as pool:
        yield Waiters(tasks, pool)


def test_a_take_waits_for_the_group_that_completes_it(tasks, mixture, waiters):
    tasks.put(math=7, code=2)
    took = waiters.start(mixture, 10, "code")
    assert tasks.streams["math"].stats().ledger.leased == 0  # nothing is held before it is wanted
    until(lambda: mixture._waits_for == ("code", 3))
    tasks.put(code=1)
    assert took.result(timeout=30) == {"math": 7, "code": 3}
    assert mixture._waits_for is None


def test_a_take_behind_a_starving_take_names_its_task(tasks, mixture, waiters):
    tasks.put(math=20, code=1)
    first = waiters.start(mixture, 10, "code")
    for timeout in (0, 0.1):
        with pytest.raises(BatchTimeout) as caught:
            mixture.take(1, timeout=timeout)
        error = caught.value
        assert (error.task, error.available, error.wanted) == ("code", 1, 3)
        assert (error.blocked, error.expired, error.others) == (0, 0, 0)
        assert "earlier take" in error.__notes__[0]
    tasks.put(code=2)
    assert first.result(timeout=30) == {"math": 7, "code": 3}
    assert_exact(mixture.taken(), WEIGHTS)


def test_a_look_waits_for_a_take_that_is_soon_over(tasks, mixture):
    tasks.put(math=7, code=3)
    with ThreadPoolExecutor(1) as pool:
        with mixture._turn:
            look = pool.submit(mixture.take, 10, timeout=0)
            time.sleep(0.1)
        look.result(timeout=30).ack()


@pytest.mark.long
def test_a_take_that_does_not_end_is_a_timeout(tasks, mixture):
    tasks.put(math=7, code=3)
    with mixture._turn, pytest.raises(BatchTimeout) as caught:
        mixture.take(10, timeout=0)
    assert caught.value.task == "code, math"
    assert caught.value.waited_s >= 1
    assert "earlier take" in caught.value.__notes__[0]
    mixture.take(10, timeout=0).ack()


def test_the_log_names_the_task_that_starves(tasks, mixture, monkeypatch, caplog):
    monkeypatch.setattr(deadline, "WARN_EVERY_S", 0.0)
    monkeypatch.setattr(deadline, "SLICE_S", 0.05)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(mixture.take, 10, timeout=30)
        until(lambda: mixture._waits_for == ("code", 3))
        second = pool.submit(mixture.take, 10, timeout=30)
        until(lambda: "the take before this one waits for task 'code'" in caplog.text)
        tasks.put(math=14, code=6)
        for future in (first, second):
            future.result(timeout=30).ack()
    assert "task 'code', consumer group 'default': 0 of 3 groups are waiting" in caplog.text


# Many at once


@pytest.mark.long
def test_threads_keep_the_ratio_at_every_moment(client, namespace, tasks, mixture):
    taken: Counter[str] = Counter()
    seen: list[int] = []
    ended = threading.Event()
    lock = threading.Lock()
    total = 240

    def take(thread):
        dice = random.Random(thread)
        each = mixture if thread % 2 else others[thread % len(others)]
        while sum(taken.values()) < total:
            try:
                lease = each.take(dice.randint(1, 6), timeout=dice.choice([0.01, 0.3]))
            except BatchTimeout:
                continue
            if dice.random() < 0.2:
                lease.release()
                continue
            seen.extend(numbers(lease.items()))
            with lock:
                taken.update(tally(lease))
            lease.ack()

    def watch():
        while not ended.wait(0.002):
            for each in (mixture, *others):
                assert_exact(each.taken(), WEIGHTS)

    others = [Mixture(client, WEIGHTS, namespace=namespace) for _ in range(2)]
    with ThreadPoolExecutor(10) as pool:
        watching = pool.submit(watch)
        takers = [pool.submit(take, thread) for thread in range(8)]
        dice = random.Random(1)
        while not all(taker.done() for taker in takers):
            tasks.put(**{dice.choice(["math", "math", "code"]): dice.randint(1, 9)})
            time.sleep(0.005)
        ended.set()
        for future in (watching, *takers):
            future.result(timeout=30)
    assert len(seen) == len(set(seen)) == sum(taken.values())
    for each in others:
        each.close()


@pytest.mark.slow
def test_processes_take_from_common_tasks_and_one_is_killed(real_url, namespace):
    """No two of them wait for groups of each other, and nothing is lost or taken twice."""
    with redrb.connect(real_url) as client:
        tasks = Tasks(client, namespace)
        workers = [Worker("many", real_url, namespace, str(seed)) for seed in range(4)]
        killed = Worker("once", real_url, namespace)
        dice = random.Random(3)
        rounds = 0
        while any(worker.process.poll() is None for worker in workers):
            tasks.put(**{dice.choice(["math", "math", "code"]): dice.randint(1, 20)})
            time.sleep(0.003)
            rounds += 1
            if rounds == 100:
                killed.process.send_signal(signal.SIGKILL)
        printed = [worker.end() for worker in workers]
        killed.end()
        seen = [number for words in printed for number in map(int, words)]
        assert len(seen) == len(set(seen))
        with Mixture(client, WEIGHTS, namespace=namespace) as mixture:
            until(
                lambda: all(
                    not stream.stats().ledger.leased for stream in mixture._streams.values()
                ),
                20,
            )
        for stream in tasks.streams.values():
            audit(stream)


# Forks


def test_parent_and_child_of_a_fork_take_separately(real_url, namespace):
    with (
        redrb.connect(real_url) as client,
        Mixture(client, WEIGHTS, namespace=namespace) as mixture,
    ):
        tasks = Tasks(client, namespace)
        tasks.put(math=21, code=9)
        lease = mixture.take(10, timeout=5)
        with mixture._turn:  # of a thread that the child does not have
            assert holds_in_a_child(lambda: mixture.take(10, timeout=5).ack() is None)
        lease.ack()
        mixture.take(10, timeout=5).ack()
        assert mixture.taken() == {"code": 6, "math": 14}
        for stream in tasks.streams.values():
            assert stream.stats().ledger.acked == stream.stats().ledger.put


class Worker:
    """A process that takes: `python -m tests.contract.test_mixture ROLE URL NAMESPACE ...`."""

    def __init__(self, *arguments: str) -> None:
        self.process = warm.Popen(
            [sys.executable, "-m", "tests.contract.test_mixture", *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )

    def end(self) -> list[str]:
        """Wait until it ends and return the words that it printed."""
        return self.process.communicate(timeout=60)[0].split()


def main() -> None:
    role, url, namespace, *seed = sys.argv[1:]
    with (
        redrb.connect(url) as client,
        Mixture(client, WEIGHTS, namespace=namespace, lease_ms=1000) as mixture,
    ):
        if role == "once":
            mixture.take(10)
            return
        dice = random.Random(int(seed[0]))
        for _ in range(40):
            with (
                suppress(BatchTimeout),
                mixture.take(dice.randint(1, 8), timeout=dice.choice([0.0, 0.02, 2.0])) as lease,
            ):
                print(*numbers(lease.items()))


if __name__ == "__main__":
    main()
