"""Training out of a task takes the steps of the formulas, in float64 and without padding.

The reference computes each sample alone, from the formulas of docs/reference/algorithms.md.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from redrb import BufferItem, DetachedTrainer, Experience, connect
from redrb.algorithms import (
    GAE,
    Completions,
    GRPOExperienceMaker,
    GRPOStep,
    NaiveExperienceMaker,
    PPOStep,
)
from redrb.experience import split_experience_batch
from tests.networks import VOCABULARY, PlainActor, PlainCritic, seeded

RATE, EPOCHS, EOS = 0.5, 3, 3


def rewards(completions: Completions) -> Tensor:
    """Return the share of tokens above 6, and a little for the length."""
    return torch.stack(
        [
            (completions.completion(row) > 6).double().mean().float()
            + 0.1 * len(completions.completion(row))
            for row in range(len(completions))
        ]
    )


def made(kind: str) -> list[BufferItem]:
    """Return samples of other policies than the trained one, with prompts of several lengths."""
    items: list[BufferItem] = []
    for seed, width in enumerate((2, 5, 3)):
        random = torch.Generator().manual_seed(seed)
        prompts = torch.randint(4, VOCABULARY, (2, width), generator=random)
        policy, reference = seeded(PlainActor, 5), seeded(PlainActor, 7)
        maker: Any = (
            GRPOExperienceMaker(policy, rewards, reference, group_size=3)
            if kind == "grpo"
            else NaiveExperienceMaker(policy, seeded(PlainCritic, 6), rewards, reference, gae=GAE())
        )
        batch = maker.make_experience(
            prompts, max_new_tokens=3 + width, eos_token_id=EOS, generator=random
        )
        items += split_experience_batch(batch)
    return items


@dataclass
class Sample:
    """One sample without padding, in float64.

    Attributes:
        tokens: Prompt and completion `[S]`.
        old, advantages, reference, values: Of each action `[A]`; None: the sample has none.
        reward: Its reward.
        proximal: Log-probabilities of the actor before the first step `[A]`.
    """

    tokens: Tensor
    old: Tensor
    advantages: Tensor
    reference: Tensor | None
    values: Tensor | None
    reward: Tensor
    proximal: Tensor

    @classmethod
    def of(cls, item: BufferItem, actor: nn.Module) -> Sample:
        counts, actions = item.attention_mask, item.action_mask
        tokens = item.sequences if counts is None else item.sequences[counts.bool()]

        def of_actions(values: Tensor | None) -> Tensor | None:
            if values is None:
                return None
            return (values if actions is None else values[actions.bool()]).double()

        old = of_actions(item.action_log_probs)
        advantages = item.advantages
        each = of_actions(advantages) if advantages.dim() else advantages.double().expand(len(old))
        with torch.no_grad():
            proximal = log_probs(actor, tokens, len(old))[0]
        return cls(
            tokens,
            old,
            each,
            of_actions(item.tensors.get("reference_log_probs")),
            of_actions(item.values),
            torch.as_tensor(item.reward).double(),
            proximal,
        )


def log_probs(actor: nn.Module, tokens: Tensor, actions: int) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each action, and the entropy there."""
    row = tokens[None]
    every = torch.log_softmax(actor(row, torch.ones_like(row))[0, -actions - 1 : -1], -1)
    chosen = every.gather(1, tokens[-actions:, None])[:, 0]
    return chosen, -(every.exp() * every).sum(-1)


def mean(losses: Sequence[Tensor], aggregation: str) -> Tensor:
    if aggregation == "token":
        return torch.cat(list(losses)).mean()
    return torch.stack([each.mean() for each in losses]).mean()


def policy_loss(actor: nn.Module, samples: list[Sample], options: dict[str, Any]) -> Tensor:
    low = options.get("clip", 0.2)
    high, cap = options.get("clip_high", low), options.get("truncated_importance")
    losses = []
    for sample in samples:
        now, entropy = log_probs(actor, sample.tokens, len(sample.old))
        before = sample.old if cap is None else sample.proximal
        ratio, advantages = (now - before).exp(), sample.advantages
        loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
        if cap is not None:
            loss = loss * (sample.proximal - sample.old).exp().clamp(max=cap)
        if options.get("beta"):
            assert sample.reference is not None
            away = sample.reference - now
            loss = loss + options["beta"] * (away.exp() - 1 - away)
        losses.append(loss - options.get("entropy_coef", 0.0) * entropy)
    return mean(losses, options["aggregation"])


def value_loss(critic: nn.Module, samples: list[Sample], options: dict[str, Any]) -> Tensor:
    limit, losses = options["value_clip"], []
    for sample in samples:
        assert sample.values is not None
        row, actions = sample.tokens[None], len(sample.old)
        # the value of an action is that of the state before it
        values = critic(row, torch.ones_like(row))[0, -actions - 1 : -1, 0]
        of_returns = options["value_target"] == "returns"
        target = sample.advantages + sample.values if of_returns else sample.reward
        loss = (values - target) ** 2
        if limit is not None:
            clipped = sample.values + (values - sample.values).clamp(-limit, limit)
            loss = torch.maximum(loss, (clipped - target) ** 2)
        losses.append(loss / 2)
    return mean(losses, options["aggregation"])


def descend(network: nn.Module, loss: Callable[[], Tensor]) -> nn.Module:
    """Return a network in float64 after the steps of plain gradient descent."""
    for _ in range(EPOCHS):
        gradients = torch.autograd.grad(loss(), list(network.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(network.parameters(), gradients, strict=True):
                parameter -= RATE * gradient
    return network


class Trainer(DetachedTrainer):
    """Trains with a given step."""

    def __init__(self, step: Callable[[Experience], Any], namespace: str, size: int) -> None:
        self._step = step
        client = connect("fake://" + namespace)
        super().__init__([], train_batch_size=size, client=client, namespace=namespace, timeout=10)

    def training_step(self, experience: Experience) -> Any:
        return self._step(experience)

    def _update_remote_makers(self, fully_update: bool = False, **config: Any) -> None:
        """Send no weights."""


def train(step: Callable[[Experience], Any], items: list[BufferItem], namespace: str) -> None:
    with Trainer(step, namespace, len(items)) as trainer:
        for item in items:
            trainer.buffer.stream.put([item])
        trainer.fit(1, 1, EPOCHS)
        assert trainer.buffer.stream.stats().ledger.acked == len(items)


def assert_same(trained: nn.Module, expected: nn.Module, start: nn.Module) -> None:
    """Each parameter's change is right to a millionth of the largest change."""
    for now, right, before in zip(
        *(network.parameters() for network in (trained, expected, start)), strict=True
    ):
        change = (right - before).detach()
        assert change.abs().max() > 1e-4
        error = (now.double() - right).detach().abs().max()
        assert error < 2e-6 * max(1.0, float(change.abs().max()))


GRPO = [
    {"aggregation": "token"},
    {"aggregation": "sequence", "beta": 0.04, "micro_batch_size": 4},
    {"aggregation": "token", "clip_high": 0.28, "truncated_importance": 1.1},
    {"aggregation": "token", "truncated_importance": 2.0, "beta": 0.1, "micro_batch_tokens": 40},
]


@pytest.mark.parametrize("options", GRPO, ids=range(len(GRPO)))
def test_grpo_through_fit(namespace, options):
    actor = seeded(PlainActor)
    right = copy.deepcopy(actor).double()
    items = made("grpo")
    samples = [Sample.of(item, right) for item in items]
    expected = descend(right, lambda: policy_loss(right, samples, options))
    start = copy.deepcopy(actor)
    optimizer = torch.optim.SGD(actor.parameters(), lr=RATE)
    train(GRPOStep(actor, optimizer, max_grad_norm=None, **options), items, namespace)
    assert_same(actor, expected, start)


PPO = [
    {"aggregation": "token", "value_target": "returns", "value_clip": 0.4},
    {"aggregation": "sequence", "value_target": "reward", "value_clip": 0.01, "clip_high": 0.3},
    {
        "aggregation": "token",
        "value_target": "returns",
        "value_clip": None,
        "entropy_coef": 0.01,
        "truncated_importance": 1.5,
        "micro_batch_size": 4,
    },
]


@pytest.mark.parametrize("options", PPO, ids=range(len(PPO)))
def test_ppo_through_fit(namespace, options):
    actor, critic = seeded(PlainActor), seeded(PlainCritic, 1)
    right, right_critic = copy.deepcopy(actor).double(), copy.deepcopy(critic).double()
    items = made("ppo")
    samples = [Sample.of(item, right) for item in items]
    expected = descend(right, lambda: policy_loss(right, samples, options))
    values = descend(right_critic, lambda: value_loss(right_critic, samples, options))
    starts = copy.deepcopy(actor), copy.deepcopy(critic)
    step = PPOStep(
        actor,
        critic,
        *(torch.optim.SGD(network.parameters(), lr=RATE) for network in (actor, critic)),
        max_grad_norm=None,
        **options,
    )
    train(step, items, namespace)
    assert_same(actor, expected, starts[0])
    assert_same(critic, values, starts[1])
