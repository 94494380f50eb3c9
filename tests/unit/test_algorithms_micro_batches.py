"""Micro-batches: the same gradient as of the whole batch, limits of samples and tokens, metrics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from redrb.algorithms import GRPOStep, PPOStep, TrainingBatch
from redrb.algorithms.batches import MicroBatches
from redrb.errors import ConfigError
from redrb.experience import BufferItem, Experience, make_experience_batch
from tests.networks import VOCABULARY, PlainActor, PlainCritic, SampleCritic, seeded

LENGTHS = [(3, 4), (5, 2), (2, 6), (9, 1), (4, 4)]
"""Tokens of prompt and completion of each sample."""


def sample(place: int, prompt: int, actions: int) -> BufferItem:
    draw = torch.Generator().manual_seed(place)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    mask = torch.ones(actions, dtype=torch.bool)
    mask[1:2] = actions < 3  # of the longer ones, the second action is masked
    tokens = torch.randint(VOCABULARY, (prompt + actions,), generator=draw)
    return BufferItem(
        tokens,
        -random(actions).abs() - 1,
        values=random(actions),
        reward=random(),
        kl=random(actions),
        advantages=random(actions),
        action_mask=mask,
        tensors={"reference_log_probs": -random(actions).abs() - 1},
    )


def batch() -> Experience:
    items = [sample(place, *lengths) for place, lengths in enumerate(LENGTHS)]
    return make_experience_batch(items)


def gradients_of(
    kind: str, experience: Experience, **options: Any
) -> tuple[list[Tensor], dict[str, float]]:
    """Take one step in float64 that changes nothing; return gradients and metrics."""
    actor = seeded(PlainActor).double()
    networks: list[nn.Module] = [actor]
    optimizer = torch.optim.SGD(actor.parameters(), lr=0.0)
    step: Any
    if kind == "grpo":
        step = GRPOStep(actor, optimizer, max_grad_norm=None, **options)
    else:
        critic = seeded(PlainCritic if kind == "ppo" else SampleCritic, 1).double()
        networks.append(critic)
        second = torch.optim.SGD(critic.parameters(), lr=0.0)
        step = PPOStep(actor, critic, optimizer, second, max_grad_norm=None, **options)
    metrics = step(experience)
    return [p.grad for network in networks for p in network.parameters()], metrics


def of_samples(experience: Experience) -> Experience:
    """Return the batch with one value a sample."""
    experience.values = experience.values.sum(1)
    return experience


@pytest.mark.parametrize("limit", [{"micro_batch_size": 2}, {"micro_batch_tokens": 14}])
@pytest.mark.parametrize("aggregation", ["token", "sequence"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("grpo", {"beta": 0.1, "clip_high": 0.4, "normalise_advantages": True}),
        ("ppo", {"normalise_advantages": True, "value_target": "returns"}),
        ("ppo", {"entropy_coef": 0.1, "truncated_importance": 0.8}),
        ("ppo of samples", {}),
    ],
)
def test_the_gradient_is_that_of_the_whole_batch(kind, options, aggregation, limit):
    made = of_samples if kind == "ppo of samples" else lambda given: given
    options = {"aggregation": aggregation, **options}
    whole, metrics = gradients_of(kind, made(batch()), **options)
    parts, of_parts = gradients_of(kind, made(batch()), **options, **limit)
    for expected, found in zip(whole, parts, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert of_parts == pytest.approx(metrics, rel=1e-5)


def shapes(parts: list[TrainingBatch]) -> list[tuple[int, ...]]:
    return [(*part.sequences.shape, part.actions) for part in parts]


def test_parts_are_trimmed_to_their_longest_row():
    whole = TrainingBatch.of(batch(), algorithm="GRPO")
    assert shapes([whole]) == [(5, 10, 6)]
    assert MicroBatches().split(whole) == [whole]
    assert shapes(MicroBatches(size=2).split(whole)) == [(2, 10, 6), (2, 8, 4), (1, 7, 2)]
    # 10 tokens fit once into 16; 8 and 8; 7 and 7
    by_tokens = MicroBatches(tokens=16).split(whole)
    assert shapes(by_tokens) == [(1, 10, 1), (2, 8, 6), (2, 7, 4)]
    assert shapes(MicroBatches(size=1, tokens=16).split(whole))[-1] == (1, 7, 2)
    # a row of more tokens than the limit is a part alone
    assert shapes(MicroBatches(tokens=3).split(whole))[0] == (1, 10, 1)
    for part in by_tokens:
        assert part.totals is whole.totals
        for row, at in zip(part.place.rows.tolist(), range(len(part.sequences)), strict=True):
            tokens = part.sequences[at][part.attention_mask[at].bool()]
            assert torch.equal(tokens, whole.sequences[row][whole.attention_mask[row].bool()])
            for name in ("advantages", "reward", "reference_log_probs"):
                field, of_whole = part.field(name)[at], whole.field(name)[row]
                assert torch.equal(field[field != 0], of_whole[of_whole != 0])


def test_a_part_without_actions_has_no_gradient():
    actor = seeded(PlainActor)
    step = GRPOStep(actor, torch.optim.SGD(actor.parameters()))
    loss, metrics = step.actor_loss(step.batch(batch(), actor).without_actions())
    loss.backward()
    assert loss == 0
    assert all(not p.grad.any() for p in actor.parameters())
    assert all(value == 0 for value in metrics.values())


@pytest.mark.parametrize("name", ["micro_batch_size", "micro_batch_tokens"])
def test_a_limit_below_one_is_refused(name):
    actor = seeded(PlainActor)
    with pytest.raises(ConfigError, match=name):
        GRPOStep(actor, torch.optim.SGD(actor.parameters()), **{name: 0})
