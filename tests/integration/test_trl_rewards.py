"""GRPO here and in TRL learn one small task equally well, with three seeds each."""

from __future__ import annotations

import statistics
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch

import redrb
from redrb import DetachedGRPOTrainer, GRPOMakerHolder, Strategy
from redrb.algorithms import Completions

trl = pytest.importorskip("trl")
from datasets import Dataset  # noqa: E402

from tests.trl_jobs import EOS, PAD, VOCABULARY, config, tiny_model, tokenizer, word  # noqa: E402

STEPS, PROMPTS, GROUP, LENGTH, RATE = 60, 4, 8, 8, 3e-3
SEEDS = (1, 2, 3)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def reward(tokens: list[int]) -> float:
    """Return the share of tokens of the upper half that a completion of full length has."""
    return sum(token >= VOCABULARY // 2 for token in tokens) / LENGTH


def prompts(seed: int) -> torch.Tensor:
    """Return the prompts of all steps `[STEPS * PROMPTS, 3]`."""
    random = torch.Generator().manual_seed(seed)
    return torch.randint(4, VOCABULARY, (STEPS * PROMPTS, 3), generator=random)


def by_trl(seed: int, output: Path) -> list[float]:
    """Return the mean reward of each step of TRL's trainer."""

    def rewarded(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [reward(each) for each in completion_ids]

    texts = [" ".join(map(word, row)) for row in prompts(seed).tolist()]
    trainer = trl.GRPOTrainer(
        tiny_model(),
        rewarded,
        config(
            output,
            seed=seed,
            max_steps=STEPS,
            num_generations=GROUP,
            per_device_train_batch_size=PROMPTS * GROUP,
            max_completion_length=LENGTH,
            learning_rate=RATE,
            lr_scheduler_type="constant",
            beta=0.0,
            loss_type="grpo",
        ),
        train_dataset=Dataset.from_dict({"prompt": texts}),
        processing_class=tokenizer(),
    )
    trainer.train()
    return [each["reward"] for each in trainer.state.log_history if "reward" in each]


def by_redrb(seed: int) -> list[float]:
    """Return the mean reward of each step of redrb's maker and trainer, which work in turn."""
    rewards: list[float] = []

    def rewarded(completions: Completions) -> torch.Tensor:
        found = [reward(completions.completion(row).tolist()) for row in range(len(completions))]
        rewards.append(statistics.mean(found))
        return torch.tensor(found)

    # in another process than the trainer a maker has a model of its own
    actor, of_maker = tiny_model(), tiny_model()
    torch.manual_seed(seed)
    name = uuid.uuid4().hex
    options: dict[str, Any] = {"client": redrb.connect(f"fake://{name}"), "namespace": name}
    with (
        DetachedGRPOTrainer(
            ["maker_0"],
            lambda: Strategy("cpu"),
            lambda: actor,
            train_batch_size=PROMPTS,
            actor_lr=RATE,
            grpo_options={"aggregation": "sequence"},
            timeout=20,
            **options,
        ) as trainer,
        GRPOMakerHolder(
            ["trainer_0"],
            lambda: Strategy("cpu"),
            lambda: (of_maker, None, rewarded, None),
            sync_models_from_trainers=True,
            group_size=GROUP,
            max_new_tokens=LENGTH,
            eos_token_id=EOS,
            pad_token_id=PAD,
            **options,
        ) as maker,
    ):
        trainer.sync_models_to_remote_makers()
        for batch in prompts(seed).split(PROMPTS):
            maker.workingloop(lambda batch=batch: [batch])
            trainer.fit(1, 1)
    return rewards


def test_grpo_here_and_in_trl_learn_equally_well(tmp_path: Path) -> None:
    theirs = [by_trl(seed, tmp_path / str(seed)) for seed in SEEDS]
    ours = [by_redrb(seed) for seed in SEEDS]
    assert all(len(each) == STEPS for each in (*theirs, *ours))
    first = [[statistics.mean(each[:5]) for each in runs] for runs in (theirs, ours)]
    last = [[statistics.mean(each[-10:]) for each in runs] for runs in (theirs, ours)]
    print(f"first 5 steps: TRL {first[0]}, redrb {first[1]}")
    print(f"last 10 steps: TRL {last[0]}, redrb {last[1]}")
    spread = max(max(last[0]) - min(last[0]), max(last[1]) - min(last[1]))
    assert abs(statistics.mean(last[0]) - statistics.mean(last[1])) <= max(spread, 0.02)
    assert min(map(min, last)) > max(map(max, first)) + 0.2
