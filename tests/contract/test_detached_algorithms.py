"""PPO and GRPO learn on the detached runtime, with plain modules and models of transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from redrb import (
    Client,
    DetachedGRPOTrainer,
    DetachedPPOTrainer,
    DetachedTrainer,
    ExperienceMakerHolder,
    GRPOMakerHolder,
    Strategy,
    WeightSubscriber,
)
from redrb.algorithms import Completions
from redrb.runtime import TrainerPerformanceEvaluator
from redrb.weights import LoraConfig

VOCABULARY, WANTED = 12, 7


class Network(nn.Module):
    """Numbers for each token, from the token alone."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.read = nn.Linear(16, outputs)

    def forward(self, sequences: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.read(self.embed(sequences)) * attention_mask[..., None]


def wanted(completions: Completions) -> torch.Tensor:
    """Return the share of the wanted token in each completion."""
    return torch.stack(
        [(completions.completion(row) == WANTED).float().mean() for row in range(len(completions))]
    )


def prompts() -> list[torch.Tensor]:
    return [torch.randint(8, VOCABULARY, (16, 3))]


def cpu() -> Strategy:
    return Strategy("cpu")


def learn(
    trainer: DetachedTrainer, maker: ExperienceMakerHolder, batches: Callable[[], int]
) -> list[float]:
    """Let maker and trainer work in turn; return the mean raw reward of each turn."""
    rewards: list[float] = []
    made = maker.make_experience

    def noting(inputs: Any) -> Any:
        experience = made(inputs)
        assert experience.policy_version == trainer.weight_version
        raw = experience.tensors.get("raw_reward", experience.reward)
        rewards.append(float(raw.mean()))
        return experience

    maker.make_experience = noting  # type: ignore[method-assign]
    trainer.sync_models_to_remote_makers()
    for _ in range(25):
        maker.workingloop(prompts)
        trainer.fit(batches(), batches())
    return rewards


@pytest.mark.parametrize("strategy", [cpu, lambda: None])
def test_ppo_learns(client: Client, namespace: str, strategy: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"client": client, "namespace": namespace}
    evaluator = TrainerPerformanceEvaluator(10, 10, ignore_first_episodes=0)
    with (
        DetachedPPOTrainer(
            ["maker_0"],
            strategy,
            lambda: (Network(VOCABULARY), Network(1)),
            train_batch_size=16,
            callbacks=[evaluator],
            actor_lr=0.05,
            critic_lr=0.05,
            timeout=20,
            **options,
        ) as trainer,
        ExperienceMakerHolder(
            ["trainer_0"],
            strategy,
            lambda: (Network(VOCABULARY), Network(1), wanted, Network(VOCABULARY)),
            sync_models_from_trainers=True,
            kl_coef=0.0,
            max_new_tokens=6,
            **options,
        ) as maker,
    ):
        rewards = learn(trainer, maker, lambda: 1)
        ledger = trainer.buffer.stream.stats().ledger
    assert sum(rewards[:3]) / 3 < 0.3
    assert sum(rewards[-3:]) / 3 > 0.7
    assert ledger.balanced
    assert ledger.acked == 25 * 16
    assert evaluator.figures["samples_per_second"] > 0


def test_grpo_learns_on_whole_groups(client: Client, namespace: str) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"client": client, "namespace": namespace}
    with (
        DetachedGRPOTrainer(
            ["maker_0"],
            cpu,
            lambda: Network(VOCABULARY),
            train_batch_size=16,
            actor_lr=0.05,
            grpo_options={"beta": 0.01},
            timeout=20,
            **options,
        ) as trainer,
        GRPOMakerHolder(
            ["trainer_0"],
            cpu,
            lambda: (Network(VOCABULARY), None, wanted, Network(VOCABULARY)),
            sync_models_from_trainers=True,
            group_size=4,
            max_new_tokens=6,
            **options,
        ) as maker,
    ):
        rewards = learn(trainer, maker, lambda: 1)
        stats = trainer.buffer.stream.stats()
        assert (stats.ledger.acked, stats.samples_acked) == (25 * 16, 25 * 16 * 4)
    assert sum(rewards[:3]) / 3 < 0.3
    assert sum(rewards[-3:]) / 3 > 0.7


class LoraLinear(nn.Linear):
    """A LoRA layer as ColossalAI's."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.weight.requires_grad_(False)
        self.bias.requires_grad_(False)
        self.r, self.lora_alpha, self.lora_dropout = 2, 4.0, 0.0
        self.lora_A = nn.Parameter(torch.randn(2, inputs))
        self.lora_B = nn.Parameter(torch.zeros(outputs, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = (x @ self.lora_A.T @ self.lora_B.T) * (self.lora_alpha / self.r)
        return super().forward(x) + added


def test_only_lora_travels_and_makers_merge_it(client: Client, namespace: str) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"client": client, "namespace": namespace}

    def with_lora() -> Network:
        model = Network(VOCABULARY)
        model.embed.requires_grad_(False)
        model.read = LoraLinear(16, VOCABULARY)
        return model

    with (
        DetachedGRPOTrainer(
            ["maker_0"],
            cpu,
            with_lora,
            train_batch_size=16,
            update_lora_weights=True,
            actor_lr=0.05,
            timeout=20,
            **options,
        ) as trainer,
        GRPOMakerHolder(
            ["trainer_0"],
            cpu,
            lambda: (Network(VOCABULARY), None, wanted, None),  # without LoRA layers
            sync_models_from_trainers=True,
            update_lora_weights=True,
            max_new_tokens=6,
            **options,
        ) as maker,
    ):
        learn(trainer, maker, lambda: 1)
        maker.workingloop(lambda: [torch.full((1, 3), 8)])
        layer = trainer.actor.read
        expected = layer.weight + (layer.lora_B @ layer.lora_A) * 2
        actual = maker.experience_maker.actor.read.weight  # type: ignore[attr-defined]
        assert torch.allclose(actual, expected, atol=1e-6)
        partial = WeightSubscriber(client, "trainer_0.partial", namespace=namespace)
        assert {version.kind for version in partial.versions()} == {"lora"}
        assert len(partial.versions()) == 2
        assert partial.adapter().configs == {"actor.read": LoraConfig(2, 4.0)}
    assert LoraConfig(2, 4.0).lora_alpha == 4.0
