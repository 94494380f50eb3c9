"""PPO and GRPO learn on the detached runtime, with plain modules and models of transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from redrb import (
    BufferItem,
    Client,
    DetachedGRPOTrainer,
    DetachedPPOTrainer,
    DetachedTrainer,
    Experience,
    ExperienceMakerHolder,
    ExperienceStream,
    GRPOMakerHolder,
    Strategy,
    TrainerCallback,
    WeightSubscriber,
)
from redrb.algorithms import Completions, GRPOExperienceMaker, GRPOStep
from redrb.errors import RecordError
from redrb.experience import split_experience_batch
from redrb.train.fresh_batches import reject_incomplete
from redrb.weights import LoraConfig
from tests.conftest import Opener
from tests.networks import VOCABULARY, LoraLinear, TokenNetwork

WANTED = 7


def wanted(completions: Completions) -> torch.Tensor:
    """Return the share of the wanted token in each completion."""
    return torch.stack(
        [(completions.completion(row) == WANTED).float().mean() for row in range(len(completions))]
    )


def numbered(completions: Completions) -> torch.Tensor:
    """Return another reward for each completion."""
    return torch.arange(float(len(completions)))


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


def test_grpo_learns_on_whole_groups(client: Client, namespace: str) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"client": client, "namespace": namespace}
    with (
        DetachedGRPOTrainer(
            ["maker_0"],
            cpu,
            lambda: TokenNetwork(VOCABULARY),
            train_batch_size=16,
            actor_lr=0.05,
            grpo_options={"beta": 0.01},
            timeout=20,
            **options,
        ) as trainer,
        GRPOMakerHolder(
            ["trainer_0"],
            cpu,
            lambda: (TokenNetwork(VOCABULARY), None, wanted, TokenNetwork(VOCABULARY)),
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


@pytest.mark.parametrize("resumes", [False, True])
def test_later_epochs_take_ratios_to_the_policy_before_the_first(
    client: Client, namespace: str, tmp_path: Path, resumes: bool
) -> None:
    """`fit` with epochs gives the ratios of as many steps on one object."""
    torch.manual_seed(0)
    seen: list[Mapping[str, float]] = []
    batches: list[Experience] = []
    running: list[DetachedTrainer] = []

    class Noting(TrainerCallback):
        def on_batch_end(self, metrics: Mapping[str, float], experience: Experience) -> None:
            batches.append(experience)
            seen.append(metrics)
            if resumes and len(seen) == 2:
                running[0].stop()

    def network() -> TokenNetwork:
        torch.manual_seed(1)
        return TokenNetwork(VOCABULARY)

    def train() -> None:
        with DetachedGRPOTrainer(
            [],
            cpu,
            network,
            train_batch_size=1,
            actor_lr=0.5,
            grpo_options={"truncated_importance": 2.0},
            checkpoint_dir=tmp_path if resumes else None,
            callbacks=[Noting()],
            client=client,
            namespace=namespace,
            timeout=20,
        ) as trainer:
            running.insert(0, trainer)
            if len(running) == 1:
                maker = GRPOExperienceMaker(TokenNetwork(VOCABULARY), numbered, group_size=4)
                made = maker.make_experience(prompts()[0][:1], max_new_tokens=6)
                trainer.buffer.stream.put(split_experience_batch(made))
            trainer.fit(1, 1, 3)

    train()
    if resumes:
        train()
    fresh = network()
    step = GRPOStep(fresh, torch.optim.Adam(fresh.parameters(), lr=0.5), truncated_importance=2.0)
    batch = batches[0]
    batch.tensors.pop("proximal_log_probs")
    ratios = [step(batch)["ratio_max"] for _ in range(3)]
    assert ratios[0] == 1 < ratios[1]
    assert [metrics["ratio_max"] for metrics in seen] == pytest.approx(
        ratios, rel=0.01
    )  # its optimizer is a little another one


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_a_learning_rate_that_was_changed_holds_after_a_resume(
    client: Client, namespace: str, tmp_path: Path, algorithm: str
) -> None:
    options: dict[str, Any] = {"checkpoint_dir": tmp_path, "checkpoint_every": 1, "timeout": 20}
    options |= {"client": client, "namespace": namespace, "train_batch_size": 1}

    def trainer(**rates: float) -> Any:
        if algorithm == "grpo":
            return DetachedGRPOTrainer(
                [], cpu, lambda: TokenNetwork(VOCABULARY), **rates, **options
            )
        models = TokenNetwork(VOCABULARY), TokenNetwork(1)
        return DetachedPPOTrainer([], cpu, lambda: models, critic_lr=0.5, **rates, **options)

    with trainer(actor_lr=0.25) as before:
        maker = GRPOExperienceMaker(TokenNetwork(VOCABULARY), numbered, group_size=1)
        made = maker.make_experience(prompts()[0][:1], max_new_tokens=6)
        made.values, made.kl = torch.zeros(1, 6), torch.zeros(1, 6)
        before.buffer.stream.put(split_experience_batch(made))
        before.actor_optim.param_groups[0]["weight_decay"] = 0.125  # as a schedule does
        before.fit(1, 1)
    with trainer(actor_lr=0.75) as after:
        assert after.resume()
        [group] = after.actor_optim.param_groups
        assert (group["lr"], group["weight_decay"]) == (0.75, 0.125)
        if algorithm == "ppo":
            assert after.critic_optim.param_groups[0]["lr"] == 0.5
        assert after.actor_optim.state, "the optimizer's averages are those of the checkpoint"


def test_only_lora_travels_and_makers_merge_it(client: Client, namespace: str) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"client": client, "namespace": namespace}

    def with_lora() -> TokenNetwork:
        model = TokenNetwork(VOCABULARY)
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
            lambda: (TokenNetwork(VOCABULARY), None, wanted, None),  # without LoRA layers
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
        weights = WeightSubscriber(client, "trainer_0", namespace=namespace)
        assert [each.kind for each in weights.versions()][-2:] == ["lora", "lora"]
        assert weights.adapter().configs == {"actor.read": LoraConfig(2, 4.0)}
    assert LoraConfig(2, 4.0).lora_alpha == 4.0


def test_groups_without_a_field_that_the_step_needs_become_dead_letters(
    client: Client, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    noted: list[tuple[int, ...]] = []

    class Noting(TrainerCallback):
        def on_misfits(self, error: RecordError) -> None:
            assert error.field == "reward"
            noted.append(error.ids)

    def sample(**fields: torch.Tensor) -> BufferItem:
        return BufferItem(torch.arange(5), -torch.ones(2), **fields)

    with (
        DetachedGRPOTrainer(
            [],
            cpu,
            lambda: TokenNetwork(VOCABULARY),
            train_batch_size=2,
            callbacks=[Noting()],
            client=client,
            namespace=namespace,
            timeout=20,
        ) as trainer,
        ExperienceStream(client, "trainer_0", namespace=namespace, checks=()) as maker,
    ):
        wrong = maker.put_many([[sample(kl=torch.ones(2))]] * 4)
        maker.put_many([[sample(advantages=torch.ones(2))]] * 4)
        trainer.fit(2, 1)
        ledger = maker.stats().ledger
        assert (ledger.acked, ledger.dead, ledger.waiting, ledger.leased) == (4, 4, 0, 0)
        letters = maker.dead_letters()
    assert noted == [wrong[:2], wrong[2:]]
    [reason] = {letter.reason for letter in letters}
    assert reason.startswith("GRPO needs advantages, or else a reward of each sample")
    said = [record for record in caplog.messages if "among the dead letters now" in record]
    expected = (
        "task 'trainer_0': 2 of the 2 groups of a batch have no usable 'reward', and are among "
        f"the dead letters now: {reason} A task keeps the fields of the groups that were put "
        "first, so put groups with 'reward' into another task, or into this one after `redrb rm`."
    )
    assert said == [expected] * 2


def test_batches_of_a_step_that_have_the_missing_field_are_requeued(open_stream: Opener) -> None:
    stream = open_stream(checks=())
    lacking, whole = (
        BufferItem(torch.arange(5), -torch.ones(2), **fields)
        for fields in ({}, {"advantages": torch.ones(2)})
    )
    first, _ = stream.put_many([[lacking], [whole]])
    leases = [stream.take(1, timeout=0) for _ in range(2)]
    error = RecordError("it is missing", field="advantages")
    assert reject_incomplete(error, leases[0].batch(), leases)
    assert error.ids == (first,)
    ledger = stream.stats().ledger
    assert (ledger.dead, ledger.waiting, ledger.leased) == (1, 1, 0)


def test_a_rank_ends_at_a_missing_field_and_the_next_trainer_does_not_meet_it(
    client: Client, namespace: str
) -> None:
    def trainer() -> DetachedGRPOTrainer:
        return DetachedGRPOTrainer(
            [],
            cpu,
            lambda: TokenNetwork(VOCABULARY),
            train_batch_size=2,
            client=client,
            namespace=namespace,
            timeout=20,
            rank=0,
            world_size=1,
        )

    with ExperienceStream(client, "trainer_0", namespace=namespace, checks=()) as maker:
        with trainer() as first:
            lone = BufferItem(torch.arange(5), -torch.ones(2))
            maker.put_many([[lone]] * 2)
            with pytest.raises(RecordError, match="GRPO needs advantages"):
                first.fit(2, 1)
        whole = BufferItem(torch.arange(5), -torch.ones(2), advantages=torch.ones(2))
        maker.put_many([[whole]] * 4)
        with trainer() as second:
            second.fit(2, 1)
        ledger = maker.stats().ledger
        assert (ledger.acked, ledger.dead) == (4, 2)
