"""Orders: which waiting group comes next, in each of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from redrb import ConfigError, ExperienceStream, LeaseLost, TaskMismatch
from redrb.connection import Client
from redrb.stream.orders import GroupFacts, Prioritized, Score
from tests.audit import audit
from tests.frequencies import check_frequencies
from tests.samples import numbered, numbers


def stream_of(client: Client, namespace: str, order: str, **options: object) -> ExperienceStream:
    return ExperienceStream(client, order, namespace=namespace, order=order, **options)


def test_a_group_is_as_old_as_its_oldest_token(client, namespace):
    # samples with and without versions of tokens fit into no batch, but into one order
    stream = stream_of(client, namespace, "stalest", checks=["values"])
    stream.put(numbered(0), policy_version=4)
    stream.put([numbered(1, policy_version=9), numbered(2, policy_version=3)])
    stream.put(numbered(3, policy_version=9, token_versions=torch.tensor([2, 9])))
    assert numbers(stream.take(3, timeout=0)) == [3, 1, 2, 0]


@pytest.mark.long
def test_prioritized_draws_by_weight_and_gives_probabilities(client, namespace):
    order = Prioritized(alpha=0.5)
    stream = ExperienceStream(client, "per", namespace=namespace, order=order, max_reads=0)
    priorities = [1.0, 4.0, 16.0, 0.25]
    ids = [stream.put(numbered(n), priority=p)[0] for n, p in enumerate(priorities)]
    weights = [p**0.5 for p in priorities]
    expected = [weight / sum(weights) for weight in weights]
    counts: Counter[int] = Counter()
    for _ in range(800):
        with stream.take(1, timeout=0) as lease:
            (number,) = numbers(lease)
            counts[number] += 1
            assert lease.probabilities == pytest.approx([expected[number]])
    check_frequencies(counts, expected)
    lease = stream.take(4, timeout=0)
    drawn_with = dict(zip(numbers(lease), lease.probabilities, strict=True))
    assert [drawn_with[n] for n in range(4)] == pytest.approx(expected)
    own = lease.importance_weights(beta=0.4)
    raw = torch.tensor([drawn_with[n] for n in numbers(lease)]) ** -0.4
    assert own.dtype == torch.float32
    assert torch.allclose(own, raw / raw.max(), atol=1e-6)
    lease.release()
    stream.update_priority([ids[3]], [10_000.0])
    audit(stream)
    hits = 0
    for _ in range(100):
        with stream.take(1, timeout=0) as lease:
            hits += numbers(lease) == [3]
    assert hits > 75  # 100 / 107


def put_and_evict(stream: ExperienceStream, _ids: list[int]) -> None:
    """Put a group of a sixth kind, which evicts the one before it: both are the stalest."""
    stream.put(numbered(5), priority=2.5, policy_version=0)


def put_and_expire(stream: ExperienceStream, _ids: list[int]) -> None:
    """Put a group that is too stale when it would be drawn."""
    stream.put(numbered(5), priority=50.0, policy_version=0)


def update(stream: ExperienceStream, ids: list[int]) -> None:
    """Give a group a large weight, and take it back."""
    for priority in (500.0, 4.0):
        stream.update_priority([ids[3]], [priority])


def release(stream: ExperienceStream, _ids: list[int]) -> None:
    """Draw groups and let them come back."""
    stream.take(2, timeout=0).release()


def requeue_failed(stream: ExperienceStream, _ids: list[int]) -> None:
    stream.take(1, timeout=0).fail("again")


@pytest.mark.long
@pytest.mark.parametrize(
    ("event", "settings", "sixth"),
    [
        (put_and_evict, {"limit": 6, "on_full": "drop_stalest", "max_staleness": 5}, 2.5),
        (put_and_expire, {"max_staleness": 2}, 0.0),
        (update, {}, 0.0),
        (release, {}, 0.0),
        (requeue_failed, {"max_deliveries": 10_000}, 0.0),
    ],
)
def test_draws_are_those_of_the_formula_whatever_happens_between_them(
    client, namespace, event, settings, sixth
):
    order = Prioritized(alpha=1.0)
    stream = ExperienceStream(
        client, "math", namespace=namespace, order=order, max_reads=0, **settings
    )
    weights = [1.0, 2.0, 3.0, 4.0, 0.5, sixth]
    stream.advance(5)
    ids = [
        stream.put(numbered(number), priority=weight, policy_version=5)[0]
        for number, weight in enumerate(weights[:5])
    ]
    drawn: Counter[int] = Counter()
    for _ in range(400):
        event(stream, ids)
        with stream.take(1, timeout=0) as lease:
            drawn.update(numbers(lease))
    assert drawn[5] > 0 or not sixth
    assert drawn[5] == 0 or sixth
    expected = [weight / sum(weights) for weight in weights if weight]
    check_frequencies(drawn, expected)
    audit(stream)


def test_groups_of_priority_zero_are_drawn_at_random_and_spoil_no_weights(client, namespace):
    stream = stream_of(client, namespace, "prioritized", max_reads=0)
    for number, priority in enumerate((1.0, 2.0, 3.0, 0.0)):
        stream.put(numbered(number), priority=priority)
    lease = stream.take(4, timeout=0)
    found = dict(zip(numbers(lease), lease.importance_weights(beta=1.0).tolist(), strict=True))
    assert [found[n] for n in range(4)] == pytest.approx([1.0, 2**-0.6, 3**-0.6, 1.0])
    lease.ack()
    with pytest.raises(LeaseLost, match="ended already"):
        lease.importance_weights()
    zeros = ExperienceStream(client, "zeros", namespace=namespace, order="prioritized", max_reads=0)
    zeros.put_many([[numbered(number)] for number in range(4)], priority=0.0)
    drawn = set()
    for _ in range(100):
        lease = zeros.take(1, timeout=0)
        drawn |= set(numbers(lease))
        assert lease.importance_weights().tolist() == [1.0]
        lease.release()
    assert drawn == {0, 1, 2, 3}


@dataclass(frozen=True)
class ByReward:
    """A user's order: draws groups by their priority as it is."""

    name: ClassVar[str] = "by priority"
    sampled: ClassVar[bool] = True

    def score(self, facts: GroupFacts, /) -> Score:
        return facts.priority or 0.0


@pytest.mark.long
@pytest.mark.parametrize("order", [Prioritized(alpha=1.0), ByReward()], ids=["ours", "theirs"])
def test_a_drawn_group_of_tiny_weight_changes_no_draws_after_it(client, namespace, pages, order):
    """The clock is at its place, 1e30; beside it, places of the others would be all the same."""
    pages(sorted=3)
    stream = ExperienceStream(client, "tiny", namespace=namespace, order=order, max_reads=0)
    stream.put_many([[numbered(number)] for number in (6, 7)], priority=1e-30)
    with stream.take(1, timeout=0) as lease:
        assert lease.probabilities == pytest.approx([0.5])
    for number in range(6):
        stream.put(numbered(number), priority=1.0 + (number > 2))
    audit(stream)
    first: Counter[int] = Counter()
    for _ in range(400):
        with stream.take(1, timeout=0) as lease:
            first.update(numbers(lease))
    expected = [1 / 9] * 3 + [2 / 9] * 3
    assert sum(first[number] for number in range(6)) == 400
    check_frequencies(first, expected)
    every = stream.take(8, timeout=0)
    assert set(numbers(every)[-2:]) == {6, 7}


def test_sums_of_weights_forget_a_large_one(client, namespace):
    stream = stream_of(client, namespace, "prioritized", max_reads=0)
    ids = [stream.put(numbered(number), priority=1.0)[0] for number in range(2)]
    heavy = stream.put(numbered(2), priority=1e55)
    for priority in (1e-55, 1e55, 0.0):
        stream.update_priority(heavy, [priority])
    with stream.take(1, timeout=0) as lease:
        assert lease.probabilities == pytest.approx([0.5])
    stream.update_priority(ids, [1e-100, 3e-100])
    with stream.take(2, timeout=0) as lease:
        assert sum(lease.probabilities) == pytest.approx(1.0)
    audit(stream)


def test_only_orders_that_draw_tell_probabilities(client, namespace):
    stream = stream_of(client, namespace, "stalest")
    stream.put(numbered(0))
    with pytest.raises(ConfigError, match="draw"):
        _ = stream.take(1, timeout=0).probabilities


@dataclass(frozen=True)
class Largest:
    """A user's order: largest groups first."""

    name: ClassVar[str] = "largest"
    sampled: ClassVar[bool] = False

    def score(self, facts: GroupFacts, /) -> Score:
        return -facts.samples


def test_an_order_from_outside_the_package(client, namespace):
    maker = ExperienceStream(client, "own", namespace=namespace, order=Largest())
    maker.put([numbered(0)])
    maker.put([numbered(1), numbered(2), numbered(3)])
    maker.put([numbered(4), numbered(5)])
    trainer = ExperienceStream(client, "own", namespace=namespace)
    assert numbers(trainer.take(3, timeout=0)) == [1, 2, 3, 4, 5, 0]
    with pytest.raises(ConfigError, match="same Order object"):
        trainer.put(numbered(9))
    with pytest.raises(TaskMismatch):
        ExperienceStream(client, "own", namespace=namespace, order="stalest")
    with pytest.raises(ConfigError, match="unknown order"):
        ExperienceStream(client, "own", namespace=namespace, order="largest")


def test_the_options_of_an_order_are_those_of_the_first(client, namespace):
    ExperienceStream(client, "per", namespace=namespace, order=Prioritized(0.5))
    with pytest.raises(TaskMismatch):
        ExperienceStream(client, "per", namespace=namespace, order=Prioritized(0.7))
