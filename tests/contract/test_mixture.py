"""Batches from several tasks: exact ratios, all or nothing, and errors name tasks that starve."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.exceptions import ConnectionError as Broken

import redrb
from redrb import BatchTimeout, ConfigError, ExperienceStream, LeaseLost
from redrb.connection import Client
from redrb.errors import RecordError, StoreUnavailable
from redrb.stream import waiting
from redrb.stream.mixture import Mixture, MixtureLease, turns
from redrb.stream.mixture.ratio import MOST_PARTS, Ratio
from redrb.stream.mixture.starvation import Starvation
from redrb.stream.mixture.turns import Operation, Turns
from redrb.stream.task.store import TaskStore
from tests.audit import audit, kill_consumer
from tests.samples import numbered, numbers

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
def tasks(client: Client, namespace: str) -> Iterator[Tasks]:
    tasks = Tasks(client, namespace)
    yield tasks
    for stream in tasks.streams.values():
        audit(stream)
        ledger = stream.stats().ledger
        assert ledger.balanced
        assert ledger.dead == 0
        stream.close()


@pytest.fixture
def mixture(client: Client, namespace: str, tasks: Tasks) -> Iterator[Mixture]:
    with Mixture(client, WEIGHTS, namespace=namespace) as mixture:
        yield mixture


def assert_exact(taken: dict[str, int], weights: dict[str, Any]) -> None:
    """Each task is less than one group away from its weight times the total."""
    total = sum(taken.values())
    exact = {task: Fraction(repr(weight)) for task, weight in weights.items()}
    for task, share in exact.items():
        behind = share / sum(exact.values()) * total - taken[task]
        assert abs(behind) < 1, f"{task}: {float(behind)} of {taken}"


def until(condition: Callable[[], bool], seconds: float = 10) -> None:
    """Wait for an effect of another thread or process."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def tally(lease: MixtureLease) -> Counter[str]:
    return Counter(lease.tasks)


# Ratios


@pytest.mark.parametrize(
    ("weights", "parts"),
    [
        ({"math": 0.7, "code": 0.3}, {"code": 3, "math": 7}),
        ({"code": 3, "math": 7}, {"code": 3, "math": 7}),
        ({"a": 1 / 7, "b": 6 / 7}, {"a": 1, "b": 6}),
        ({"a": 0.1 + 0.2, "b": 0.7}, {"a": 3, "b": 7}),
        ({"a": Fraction(1, 3), "b": 1}, {"a": 1, "b": 3}),
        ({"a": 1.0}, {"a": 1}),
        ({"a": 10**400, "b": 10**400}, {"a": 1, "b": 1}),
    ],
)
def test_weights_of_any_scale_are_held_exactly(
    weights: dict[str, Any], parts: dict[str, int]
) -> None:
    ratio = Ratio.of(weights)
    assert ratio.parts == parts
    assert sum(ratio.weights.values()) == pytest.approx(1)


def test_weights_that_are_no_simple_fractions_are_held_closely() -> None:
    weights = {"a": 0.123456789012345, "b": 2**0.5, "c": 3.0}
    ratio = Ratio.of(weights)
    assert sum(ratio.parts.values()) == MOST_PARTS
    whole = sum(weights.values())
    for task, weight in weights.items():
        assert ratio.weights[task] == pytest.approx(weight / whole, abs=2**-32)


@pytest.mark.parametrize("weight", [0, -1, -0.5, float("nan"), float("inf"), "1", None, True, 1j])
def test_a_weight_that_is_no_positive_number_is_refused(weight: Any) -> None:
    with pytest.raises(ConfigError, match="task 'code'"):
        Ratio.of({"math": 1, "code": weight})


@pytest.mark.parametrize("weights", [{}, None, ["math"], "math", {"ma:th": 1}, {"": 1}, {3: 1}])
def test_weights_without_valid_task_names_are_refused(weights: Any) -> None:
    with pytest.raises(ConfigError):
        Ratio.of(weights)


def test_a_weight_below_the_resolution_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'b'.*2\*\*-32"):
        Ratio.of({"a": 1e20, "b": 1})


@settings(max_examples=60, deadline=None)
@given(
    weights=st.lists(st.integers(1, 10**6) | st.floats(1e-3, 1e3), min_size=1, max_size=7),
    counts=st.lists(st.integers(1, 40) | st.integers(1, 2**20), min_size=1, max_size=12),
)
def test_any_takes_in_any_ratio_stay_within_one_group(
    weights: list[float], counts: list[int]
) -> None:
    with redrb.connect("fake://ratios") as client:
        ratio = Ratio.of({f"t{index}": weight for index, weight in enumerate(weights)})
        turn_queue = Turns(client, f"n{random.randrange(2**60)}", "default", ratio)
        operation = Operation()
        for count in counts:
            operation.begin(count)
            operation.shares = turn_queue.ask(operation, queue=False, retry_s=0).shares
            assert min(operation.shares.values()) >= 0
            assert sum(operation.shares.values()) == count
            assert turn_queue.keep(operation, retry_s=0)
            taken = {task: figures.taken for task, figures in turn_queue.look().items()}
            whole = sum(ratio.parts.values())
            for task, part in ratio.parts.items():
                assert abs(part * sum(taken.values()) - whole * taken[task]) < whole


def test_many_small_takes_stay_within_one_group(client: Client, namespace: str) -> None:
    weights = {"a": 0.5, "b": 0.29, "c": 0.2, "d": 0.0099, "e": 0.0001}
    turn_queue = Turns(client, namespace, "default", Ratio.of(weights))
    operation, taken = Operation(), Counter(dict.fromkeys(weights, 0))
    dice = random.Random(7)
    for _ in range(400):
        operation.begin(dice.choice([1, 1, 2, 3, 31]))
        operation.shares = turn_queue.ask(operation, queue=False, retry_s=0).shares
        assert turn_queue.keep(operation, retry_s=0)
        taken.update(operation.shares)
        assert_exact(taken, weights)
    assert {task: figures.taken for task, figures in turn_queue.look().items()} == taken


@pytest.mark.parametrize(
    ("parts", "counts"),
    [
        ([50, 5, 50, 50, 5], [5, 1, 2, 5, 1, 2, 3, 3, 1, 1]),
        ([8, 100, 100, 100, 8, 8], [1, 2, 5, 5, 5, 3, 1, 1, 1, 1]),
        ([100, 8, 1, 100, 8, 1, 100, 8], [1, 1, 5, 2, 3, 2, 2, 5, 2, 1]),
    ],
)
def test_takes_that_largest_remainders_would_split_wrongly(
    client: Client, namespace: str, parts: list[int], counts: list[int]
) -> None:
    weights = {f"t{index}": part for index, part in enumerate(parts)}
    turn_queue = Turns(client, namespace, "default", Ratio.of(weights))
    operation, taken = Operation(), Counter(dict.fromkeys(weights, 0))
    for count in counts:
        operation.begin(count)
        operation.shares = turn_queue.ask(operation, queue=False, retry_s=0).shares
        assert turn_queue.keep(operation, retry_s=0)
        taken.update(operation.shares)
        assert_exact(taken, weights)


def test_a_turn_goes_to_the_queue_before_new_operations(client: Client, namespace: str) -> None:
    turn_queue = Turns(client, namespace, "default", Ratio.of(WEIGHTS))
    first, second, third = Operation(), Operation(), Operation()
    for operation in (first, second, third):
        operation.begin(1)
    assert turn_queue.ask(first, queue=True, retry_s=0).granted
    assert not turn_queue.ask(second, queue=True, retry_s=0).granted
    turn_queue.give(first)
    assert not turn_queue.ask(third, queue=True, retry_s=0).granted
    assert turn_queue.ask(second, queue=True, retry_s=0).granted
    turn_queue.give(second)
    assert turn_queue.ask(third, queue=True, retry_s=0).granted


def test_an_operation_that_lost_the_turn_can_neither_keep_nor_hold(
    client: Client, namespace: str
) -> None:
    turn_queue = Turns(client, namespace, "default", Ratio.of(WEIGHTS))
    slow, quick = Operation(), Operation()
    for operation in (slow, quick):
        operation.begin(1)
        operation.shares = turn_queue.ask(operation, queue=False, retry_s=0).shares
        client.execute("DEL", turn_queue._store.keys.stream.removesuffix("stream") + "turn")
    assert turn_queue.ask(quick, queue=False, retry_s=0).granted
    assert not turn_queue.keep(slow, retry_s=0)
    assert not turn_queue.hold(slow)
    assert turn_queue.keep(quick, retry_s=0)
    turn_queue.give(slow)
    assert turn_queue.look()["math"].taken == 1


def test_a_late_attempt_blocks_no_operation(client: Client, namespace: str) -> None:
    turn_queue = Turns(client, namespace, "default", Ratio.of(WEIGHTS))
    late, next_ = Operation(), Operation()
    late.begin(1)
    next_.begin(1)
    assert turn_queue.ask(late, queue=False, retry_s=0).granted
    turn_queue.give(late)
    assert not turn_queue.ask(late, queue=True, retry_s=0).granted
    assert turn_queue.ask(next_, queue=False, retry_s=0).granted


def test_a_turn_does_not_inherit_the_task_waited_for(client: Client, namespace: str) -> None:
    turn_queue = Turns(client, namespace, "default", Ratio.of(WEIGHTS))
    first, second, third = Operation(), Operation(), Operation()
    for operation in (first, second, third):
        operation.begin(10)
    first.shares = turn_queue.ask(first, queue=False, retry_s=0).shares
    assert turn_queue.hold(first, waits_for="code")
    answer = turn_queue.ask(second, queue=True, retry_s=0)
    assert (answer.granted, answer.waits_for, answer.need) == (False, "code", 3)
    turn_queue.give(first)
    assert turn_queue.ask(second, queue=True, retry_s=0).granted
    answer = turn_queue.ask(third, queue=True, retry_s=0)
    assert (answer.granted, answer.waits_for, answer.need) == (False, "", 0)


# Takes


def test_a_take_is_of_all_tasks_and_one_batch(tasks: Tasks, mixture: Mixture) -> None:
    tasks.put(math=20, code=20)
    with mixture.take(10, timeout=0) as lease:
        assert len(lease) == lease.samples == 10
        assert tally(lease) == {"math": 7, "code": 3}
        assert numbers(lease.items()) == [1000, 1001, 1002, *range(7)]
        assert [numbers(group) for group in lease.groups()][:4] == [[1000], [1001], [1002], [0]]
        batch = lease.batch()
        assert batch.sequences is not None
        assert batch.sequences.shape == (10, 3)
        assert batch.reward is not None
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


def test_a_batch_pads_samples_of_all_tasks_to_one_length(tasks: Tasks, mixture: Mixture) -> None:
    long = numbered(5, sequences=torch.arange(6), action_log_probs=torch.zeros(4))
    tasks.streams["code"].put([long, long])
    tasks.put(math=3)
    with mixture.take(3, timeout=0) as lease:
        batch = lease.batch(side="right")
        assert batch.sequences is not None
        assert batch.sequences.shape == (4, 6)
        assert batch.action_log_probs is not None
        assert batch.action_log_probs.shape == (4, 4)
        assert batch.attention_mask is not None
        assert batch.attention_mask.sum(1).tolist() == [6, 6, 3, 3]
        assert lease.sample_tasks == ["code", "code", "math", "math"]
        assert lease.tasks == ["code", "math", "math"]


def test_single_groups_come_in_the_ratio(tasks: Tasks, mixture: Mixture) -> None:
    tasks.put(math=70, code=30)
    taken = Counter({"math": 0, "code": 0})
    for _ in range(100):
        with mixture.take(1, timeout=0) as lease:
            taken.update(lease.tasks)
        assert_exact(taken, WEIGHTS)
    assert taken == {"math": 70, "code": 30}
    assert tasks.waiting() == {"math": 0, "code": 0}


def test_ratios_belong_to_a_consumer_group_and_to_their_weights(
    client: Client, namespace: str, tasks: Tasks, mixture: Mixture
) -> None:
    tasks.put(math=9, code=9)
    mixture.take(1, timeout=0).ack()
    with (
        Mixture(client, {"code": 30, "math": 70}, namespace=namespace) as scaled,
        Mixture(client, WEIGHTS, namespace=namespace, group="other") as other,
        Mixture(client, {"math": 0.5, "code": 0.5}, namespace=namespace) as even,
    ):
        assert scaled.taken() == mixture.taken() == {"code": 0, "math": 1}
        assert other.taken() == even.taken() == {"code": 0, "math": 0}


def test_the_lease_before_is_acknowledged_first(tasks: Tasks, mixture: Mixture) -> None:
    tasks.put(math=14, code=6)
    first = mixture.take(10, timeout=0)
    second = mixture.take(10, timeout=0, ack=first)
    assert not first
    with pytest.raises(BatchTimeout):
        mixture.take(10, timeout=0, ack=second)
    assert not second
    assert [stream.stats().ledger.acked for stream in tasks.streams.values()] == [14, 6]


def test_some_groups_or_all_are_acknowledged_or_released(tasks: Tasks, mixture: Mixture) -> None:
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


def test_reject_moves_groups_to_the_dead_letters_of_each_task(
    client: Client, namespace: str
) -> None:
    tasks = Tasks(client, namespace)
    tasks.put(math=7, code=3)
    with Mixture(client, WEIGHTS, namespace=namespace) as mixture:
        mixture.take(10, timeout=0).reject("looks odd")
    for task, count in (("math", 7), ("code", 3)):
        letters = tasks.streams[task].dead_letters()
        assert [letter.reason for letter in letters] == ["looks odd"] * count


@pytest.mark.parametrize(("error", "failed"), [(ValueError, 1), (KeyboardInterrupt, 0)])
def test_an_exception_in_the_block_requeues_all_groups(
    tasks: Tasks, mixture: Mixture, error: type[BaseException], failed: int
) -> None:
    tasks.put(math=7, code=3)
    with pytest.raises(error), mixture.take(10, timeout=0):
        raise error
    assert tasks.waiting() == {"math": 7, "code": 3}
    mixture.take(10, timeout=0).reject("to count deliveries")
    for stream in tasks.streams.values():
        letters = stream.dead_letters()
        assert {letter.failed_deliveries for letter in letters} == {failed}
        stream.clear()


def test_misfits_become_dead_letters_and_the_others_are_requeued(
    client: Client, namespace: str
) -> None:
    tasks = Tasks(client, namespace)
    tasks.put(math=7, code=2)
    tasks.streams["code"].put(numbered(9, values=torch.zeros(2)))
    with Mixture(client, WEIGHTS, namespace=namespace) as mixture:
        with pytest.raises(RecordError) as caught, mixture.take(10, timeout=0) as lease:
            lease.batch()
        assert caught.value.ids == (3,)
        assert "task 'code'" in caught.value.__notes__[0]
        assert tasks.waiting() == {"math": 7, "code": 2}
        assert [letter.id for letter in tasks.streams["code"].dead_letters()] == [3]
        assert tasks.streams["math"].dead_letters() == []


def test_misfits_of_one_task_s_batch_reject_no_group_of_another_task(
    client: Client, namespace: str
) -> None:
    tasks = Tasks(client, namespace)
    tasks.put(math=7)
    tasks.streams["code"].put_many([[numbered(1)], [numbered(2, values=torch.zeros(2))]] * 2)
    with Mixture(client, WEIGHTS, namespace=namespace) as mixture:
        with pytest.raises(RecordError), mixture.take(10, timeout=0) as lease:
            lease.parts["code"].batch()
        assert tasks.waiting() == {"math": 7, "code": 4}


def test_a_lost_task_is_named_and_the_others_are_acknowledged(
    client: Client, namespace: str, tasks: Tasks, mixture: Mixture
) -> None:
    tasks.put(math=7, code=3)
    lease = mixture.take(10, timeout=0)
    kill_consumer(mixture._streams["code"])
    tasks.streams["code"].take(3, timeout=0).ack()  # takes them over
    with pytest.raises(LeaseLost) as caught:
        lease.ack()
    assert caught.value.task == "code"
    assert caught.value.ids == (1, 2, 3)
    assert not lease
    assert tasks.streams["math"].stats().ledger.acked == 7


# Waiting and starving


def test_a_task_that_starves_is_named_and_nothing_is_taken(
    tasks: Tasks, mixture: Mixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked_s: list[float] = []
    whole = TaskStore.wait_for_wake

    def wait_for_wake(self: TaskStore, *arguments: Any) -> Any:
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
    starvation = mixture.starvation()
    assert starvation["math"].short == 0
    assert starvation["code"].short == 1
    assert blocked_s  # on a busy machine the time before it is a part of the timeout, too
    assert sum(blocked_s) - 0.005 < starvation["code"].waited_s < 5
    assert starvation["code"].waiting_s == 0
    tasks.put(code=1)
    lease = mixture.take(10, timeout=0)
    assert numbers(lease.items()) == [1000, 1001, 1002, *range(7)]
    lease.ack()


@pytest.mark.long
def test_shares_leased_before_a_timeout_are_requeued_unharmed(
    tasks: Tasks, mixture: Mixture
) -> None:
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


def test_all_tasks_that_starve_are_named(tasks: Tasks, mixture: Mixture) -> None:
    tasks.put(math=6)
    with pytest.raises(BatchTimeout) as caught:
        mixture.take(10, timeout=0)
    error = caught.value
    assert (error.task, error.available, error.wanted) == ("code, math", 6, 10)
    assert "task 'code': 0 of 3 groups were waiting." in error.__notes__
    assert "task 'math': 6 of 7 groups were waiting." in error.__notes__
    assert {task: each.short for task, each in mixture.starvation().items()} == {
        "code": 1,
        "math": 1,
    }


def test_a_share_that_exceeds_a_limit_is_an_error_and_not_a_wait(
    client: Client, namespace: str
) -> None:
    with (
        ExperienceStream(client, "math", namespace=namespace, limit=4) as math,
        Mixture(client, WEIGHTS, namespace=namespace) as mixture,
    ):
        math.put(numbered(1))
        mixture._streams["code"].put_many([[numbered(1)]] * 3)
        with pytest.raises(ConfigError, match="at most 4 groups"):
            mixture.take(10)
        assert len(mixture._streams["code"]) == 3


@pytest.mark.parametrize("count", [0, -1, 1.5, "3", None, True, 2**20 + 1])
def test_a_bad_count_is_refused(mixture: Mixture, count: Any) -> None:
    with pytest.raises(ConfigError):
        mixture.take(count)


def test_a_wrong_client_is_refused() -> None:
    with pytest.raises(ConfigError, match="connect"):
        Mixture("redis://", WEIGHTS)  # type: ignore[arg-type]


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

    def queue(self, mixture: Mixture, count: int) -> Future[Counter[str]]:
        """Start a take and return when it waits for its turn."""
        before = self.queued(mixture)
        future = self._pool.submit(self._take, mixture, count)
        until(lambda: self.queued(mixture) == before + 1)
        return future

    def queued(self, mixture: Mixture) -> int:
        prefix = mixture._turns._store.keys.stream.removesuffix("stream")
        return int(
            self._tasks.streams["math"]._task.store.client.execute("ZCARD", f"{prefix}queue:turn")
        )

    def _take(self, mixture: Mixture, count: int) -> Counter[str]:
        with mixture.take(count, timeout=30) as lease:
            return tally(lease)


@pytest.fixture
def waiters(tasks: Tasks, only_wakes: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Waiters]:
    monkeypatch.setattr(turns, "QUEUE_TTL_MS", 60_000)
    with ThreadPoolExecutor(8) as pool:
        yield Waiters(tasks, pool)


def test_a_take_waits_for_the_group_that_completes_it(
    tasks: Tasks, mixture: Mixture, waiters: Waiters
) -> None:
    tasks.put(math=7, code=2)
    took = waiters.start(mixture, 10, "code")
    assert tasks.streams["math"].stats().ledger.leased == 0  # nothing is held before it is wanted
    until(lambda: mixture.starvation()["code"].waiting_s > 0)
    assert mixture.starvation()["math"].waiting_s == 0
    tasks.put(code=1)
    assert took.result(timeout=30) == {"math": 7, "code": 3}
    assert mixture.starvation()["code"].waiting_s == 0
    assert mixture.starvation()["code"].short == 1


def test_takes_go_one_after_the_other_in_their_order(
    client: Client, namespace: str, tasks: Tasks, mixture: Mixture, waiters: Waiters
) -> None:
    tasks.put(math=7)
    with Mixture(client, WEIGHTS, namespace=namespace) as other:
        first = waiters.start(mixture, 10, "code")
        second = waiters.queue(other, 10)
        third = waiters.queue(mixture, 10)
        tasks.put(code=3)
        assert first.result(timeout=30) == {"math": 7, "code": 3}
        tasks.put(code=3)
        assert not second.done()
        tasks.put(math=7)
        assert second.result(timeout=30) == {"math": 7, "code": 3}
        tasks.put(math=7, code=3)
        assert third.result(timeout=30) == {"math": 7, "code": 3}
        assert_exact(other.taken(), WEIGHTS)
        assert mixture.starvation()["code"].short == 3


def test_a_take_behind_a_starving_take_names_its_task(
    client: Client, namespace: str, tasks: Tasks, mixture: Mixture, waiters: Waiters
) -> None:
    tasks.put(math=20, code=1)
    first = waiters.start(mixture, 10, "code")
    until(lambda: mixture.starvation()["code"].waiting_s > 0)
    with Mixture(client, WEIGHTS, namespace=namespace) as other:
        for timeout in (0, 0.1):
            with pytest.raises(BatchTimeout) as caught:
                other.take(1, timeout=timeout)
            error = caught.value
            assert (error.task, error.available, error.wanted) == ("code", 1, 3)
            assert error.waited_s < 5
        assert waiters.queued(mixture) == 0
    tasks.put(code=2)
    assert first.result(timeout=30) == {"math": 7, "code": 3}


def test_a_look_waits_for_a_turn_that_is_soon_over(
    client: Client, namespace: str, tasks: Tasks, mixture: Mixture
) -> None:
    tasks.put(math=7, code=3)
    operation = Operation()
    operation.begin(1)
    assert mixture._turns.ask(operation, queue=False, retry_s=0).granted
    with ThreadPoolExecutor(1) as pool:
        look = pool.submit(mixture.take, 10, timeout=0)
        time.sleep(0.1)
        mixture._turns.give(operation)
        look.result(timeout=30).ack()


@pytest.mark.long
def test_a_turn_that_does_not_end_is_a_timeout(tasks: Tasks, mixture: Mixture) -> None:
    tasks.put(math=7, code=3)
    operation = Operation()
    operation.begin(1)
    assert mixture._turns.ask(operation, queue=False, retry_s=0).granted
    with pytest.raises(BatchTimeout) as caught:
        mixture.take(10, timeout=0)
    assert caught.value.task == "code, math"
    assert caught.value.waited_s >= 1
    assert "earlier take" in caught.value.__notes__[0]
    mixture._turns.give(operation)
    mixture.take(10, timeout=0).ack()


def test_the_log_names_the_task_that_starves(
    client: Client,
    namespace: str,
    tasks: Tasks,
    mixture: Mixture,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(waiting, "WARN_EVERY_S", 0.0)
    with (
        ThreadPoolExecutor(1) as pool,
        Mixture(client, WEIGHTS, namespace=namespace) as other,
    ):
        first = pool.submit(mixture.take, 10, timeout=30)
        until(lambda: mixture.starvation()["code"].waiting_s > 0)
        with pytest.raises(BatchTimeout):
            other.take(1, timeout=0.05)
        tasks.put(math=7, code=3)
        first.result(timeout=30).ack()
    printed = "\n".join(record.getMessage() for record in caplog.records)
    assert "task 'code', consumer group 'default': 0 of 3 groups are waiting" in printed
    assert "the take before this one waits for task 'code'" in printed


# Many at once


@pytest.mark.long
def test_threads_keep_the_ratio_at_every_moment(
    client: Client, namespace: str, tasks: Tasks, mixture: Mixture
) -> None:
    taken: Counter[str] = Counter()
    seen: list[int] = []
    ended = threading.Event()
    lock = threading.Lock()
    total = 240

    def take(thread: int) -> None:
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

    def watch() -> None:
        while not ended.wait(0.002):
            assert_exact(mixture.taken(), WEIGHTS)

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


@pytest.mark.long
def test_processes_keep_the_ratio(real_url: str, namespace: str) -> None:
    with redrb.connect(real_url) as client:
        tasks = Tasks(client, namespace)
        workers = [Worker("many", real_url, namespace, str(seed)) for seed in range(4)]
        with Mixture(client, WEIGHTS, namespace=namespace) as mixture:
            dice = random.Random(3)
            while any(worker.process.poll() is None for worker in workers):
                tasks.put(**{dice.choice(["math", "math", "code"]): dice.randint(1, 20)})
                assert_exact(mixture.taken(), WEIGHTS)
                time.sleep(0.003)
            printed = [worker.end() for worker in workers]
            taken = mixture.taken()
            assert_exact(taken, WEIGHTS)
            seen = [number for words in printed for number in map(int, words)]
            assert len(seen) == len(set(seen)) == sum(taken.values())
            assert sum(number >= 1000 for number in seen) == taken["code"]
        for stream in tasks.streams.values():
            audit(stream)
            assert stream.stats().ledger.leased == 0


@pytest.mark.long
def test_a_killed_caller_leaves_its_turn_and_its_groups_to_others(
    real_url: str, namespace: str
) -> None:
    with redrb.connect(real_url) as client:
        tasks = Tasks(client, namespace)
        tasks.put(math=3, code=9)
        worker = Worker("once", real_url, namespace)
        try:
            until(lambda: tasks.streams["math"].stats().consumers_waiting == 1, 20)
            assert tasks.streams["code"].stats().ledger.leased == 3
            worker.process.send_signal(signal.SIGKILL)
        finally:
            worker.end()
        with Mixture(client, WEIGHTS, namespace=namespace) as mixture:
            assert mixture.taken() == {"code": 0, "math": 0}
            tasks.put(math=4)
            lease = mixture.take(10, timeout=20)
            assert tally(lease) == {"math": 7, "code": 3}
            lease.ack()
            assert mixture.taken() == {"code": 3, "math": 7}
            # its consumer is dead for the tasks too, a little later
            tasks.put(math=14)
            mixture.take(20, timeout=20).ack()
            assert mixture.taken() == {"code": 9, "math": 21}
        for stream in tasks.streams.values():
            audit(stream)


@pytest.mark.long
def test_a_turn_lasts_as_long_as_its_caller_waits(
    client: Client, namespace: str, tasks: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "TURN_MS", 300)
    with (
        Mixture(client, WEIGHTS, namespace=namespace) as mixture,
        Mixture(client, WEIGHTS, namespace=namespace) as other,
        ThreadPoolExecutor(1) as pool,
    ):
        first = pool.submit(mixture.take, 10, timeout=30)
        until(lambda: mixture.starvation()["code"].waiting_s > 0)
        tasks.put(math=7)
        with pytest.raises(BatchTimeout, match="'code'"):
            other.take(1, timeout=1)  # of math, which there is
        tasks.put(code=3)
        first.result(timeout=30).ack()


def test_a_caller_that_stood_still_begins_again(
    client: Client, namespace: str, tasks: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks.put(code=2, math=1)
    with (
        Mixture(client, WEIGHTS, namespace=namespace) as mixture,
        Mixture(client, WEIGHTS, namespace=namespace) as other,
        ThreadPoolExecutor(1) as pool,
    ):
        monkeypatch.setattr(mixture._operations, "hold", lambda _: None)  # no heartbeat
        first = pool.submit(mixture.take, 10, timeout=30)
        until(lambda: mixture.starvation()["code"].waiting_s > 0)
        prefix = mixture._turns._store.keys.stream.removesuffix("stream")
        client.execute("DEL", f"{prefix}turn")
        with other.take(1, timeout=5) as lease:
            assert lease.tasks == ["math"]
        tasks.put(code=1, math=7)
        assert tally(first.result(timeout=30)) == {"math": 7, "code": 3}
        assert mixture.taken() == {"code": 3, "math": 8}


# Connections that break


class Line:
    """Executes a client's scripts of the mixture, and loses the replies of some."""

    def __init__(self, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lose: Callable[[str], bool] = lambda _: False
        self._once = client.once
        monkeypatch.setattr(client, "once", self.once)

    def once(self, *arguments: Any) -> Any:
        reply = self._once(*arguments)
        of_mixture = arguments[0] in ("EVALSHA", "EVAL") and ":mixture:" in str(arguments[3])
        if of_mixture and self.lose(arguments[4]):
            raise Broken("the reply is lost")
        return reply


@pytest.fixture
def line(client: Client, monkeypatch: pytest.MonkeyPatch) -> Line:
    return Line(client, monkeypatch)


@pytest.mark.long
def test_repeated_requests_count_once(
    client: Client, namespace: str, tasks: Tasks, line: Line
) -> None:
    tasks.put(math=70, code=30)
    dice = random.Random(5)
    line.lose = lambda _: dice.random() < 0.5
    taken = Counter({"math": 0, "code": 0})
    with Mixture(client, WEIGHTS, namespace=namespace) as mixture:
        for _ in range(20):
            with mixture.take(dice.randint(1, 5), timeout=10) as lease:
                taken.update(lease.tasks)
        line.lose = lambda _: False
        assert mixture.taken() == taken
        assert_exact(taken, WEIGHTS)


@pytest.mark.long
def test_a_take_whose_reply_is_lost_is_cancelled(
    client: Client, namespace: str, tasks: Tasks, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks.put(math=14, code=6)
    with Mixture(client, WEIGHTS, namespace=namespace) as mixture:
        monkeypatch.setattr("redrb.stream.mixture.operations.SHORT_OUTAGE_S", 0.05)
        line.lose = lambda verb: verb == "keep"
        with pytest.raises(StoreUnavailable):
            mixture.take(10, timeout=0.1)
        assert mixture.taken() == {"code": 0, "math": 0}
        line.lose = lambda verb: verb in ("keep", "give")
        with pytest.raises(StoreUnavailable):
            mixture.take(10, timeout=0.1)
        assert tasks.waiting() == {"math": 14, "code": 6}
        line.lose = lambda _: False
        with mixture.take(1, timeout=5) as lease:
            assert lease.tasks == ["math"]
        assert mixture.taken() == {"code": 0, "math": 1}


def test_figures_count_once_however_often_a_take_is_ended(client: Client, namespace: str) -> None:
    turn_queue = Turns(client, namespace, "default", Ratio.of(WEIGHTS))
    operation = Operation()
    operation.begin(10)
    operation.shares = turn_queue.ask(operation, queue=False, retry_s=0).shares
    operation.shortages.add("code", 1.5)
    waited = Starvation(short=1, waited_s=1.5, waiting_s=0)
    for _ in range(2):
        assert turn_queue.keep(operation, retry_s=0)
        assert turn_queue.look()["code"] == turns.Figures(3, waited)
    for _ in range(2):
        turn_queue.give(operation)
        assert turn_queue.look()["code"] == turns.Figures(0, waited)
    assert not turn_queue.keep(operation, retry_s=0)
    assert not turn_queue.hold(operation)


def test_keys_of_dead_callers_expire(client: Client, namespace: str, tasks: Tasks) -> None:
    tasks.put(math=7, code=3)
    with Mixture(client, WEIGHTS, namespace=namespace) as mixture:
        mixture.take(10, timeout=0).ack()
        with suppress(BatchTimeout):
            mixture.take(10, timeout=0.01)
        gone = [Operation(), Operation()]
        for operation in gone:  # callers that die with their turn, and behind it
            operation.begin(1)
            mixture._turns.ask(operation, queue=True, retry_s=0)
        keys = client.execute("KEYS", f"redrb:{{{namespace}:mixture:*")
        assert len(keys) == 5  # task, turn, queue, needs, ended
        for key in keys:
            assert client.execute("PTTL", key) > 0


# Forks


def test_parent_and_child_of_a_fork_take_separately(real_url: str, namespace: str) -> None:
    with (
        redrb.connect(real_url) as client,
        Mixture(client, WEIGHTS, namespace=namespace) as mixture,
    ):
        tasks = Tasks(client, namespace)
        tasks.put(math=21, code=9)
        lease = mixture.take(10, timeout=5)
        in_a_child(lambda: mixture.take(10, timeout=5).ack())
        lease.ack()
        mixture.take(10, timeout=5).ack()
        assert mixture.taken() == {"code": 9, "math": 21}
        for stream in tasks.streams.values():
            assert stream.stats().ledger.acked == stream.stats().ledger.put


def in_a_child(work: Callable[[], object]) -> None:
    """Run `work` in a forked process and check that it ended well."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads and fork do not mix well
        pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0


class Worker:
    """A process that takes: `python -m tests.contract.test_mixture ROLE URL NAMESPACE ...`."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
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
