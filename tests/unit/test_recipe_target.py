"""The end of a recipe's training: which evaluations reach the target, and that it is remembered."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import redrb
from redrb import Client, ExperienceStream
from redrb.algorithms import Completion
from redrb.errors import BatchTimeout
from redrb.recipe import EpisodeRecipe, GRPORecipe, Recipe
from redrb.recipe.trainer import RecipeTrainer
from tests.networks import VOCABULARY, PlainActor, seeded
from tests.samples import numbered

Events = list[tuple[str, dict[str, Any]]]


class Judged(GRPORecipe):
    """Its reward raises for wrong answers, as a parser does."""

    max_new_tokens = 1
    target_reward = 0.9
    device = "cpu"
    eos_token_id = None
    pad_token_id = 0

    def model(self) -> nn.Module:
        return seeded(PlainActor)

    def prompts(self) -> list[dict[str, Any]]:
        return []

    def held_out(self) -> list[dict[str, Any]]:
        return [{"input_ids": [number % VOCABULARY], "number": number} for number in range(20)]

    def decode(self, tokens: torch.Tensor) -> str:
        return str(tokens.tolist())

    def reward(self, completion: Completion) -> float:
        if completion["number"] < self.failing:
            raise ValueError("no answer found")
        return 1.0

    failing = 0


class MostFail(Judged):
    failing = 19


class AllFail(Judged):
    failing = 20


class EpisodesFail(EpisodeRecipe):
    """Its episodes fail for most prompts."""

    target_reward = 0.9
    device = "cpu"
    eos_token_id = None
    pad_token_id = 0

    model, prompts, held_out, decode = Judged.model, Judged.prompts, Judged.held_out, Judged.decode

    async def episode(self, prompt: dict[str, Any], engine: Any) -> Any:
        if prompt["number"] < 19:
            raise ValueError("no answer found")
        return numbered(1)


class Counted(Recipe):
    """Has no held-out prompts: the reward is that of its batches."""

    groups = 2
    evaluate_every = 1
    target_reward = 1.0
    max_staleness = -1
    device = "cpu"
    idle_timeout = 10.0

    def models(self) -> dict[str, nn.Module]:
        return {"actor": nn.Linear(1, 1)}

    def prompts(self) -> list[dict[str, Any]]:
        return []

    def rollout(self, models: Any, prompt: Any) -> Any:
        raise NotImplementedError

    def optimizers(self, models: dict[str, nn.Module]) -> dict[str, Any]:
        return {"actor": torch.optim.SGD(models["actor"].parameters(), lr=0.1)}

    def step(self, models: Any, optimizers: Any, experience: Any) -> dict[str, Any]:
        return {}


@pytest.fixture
def client(namespace: str) -> Iterator[Client]:
    with redrb.connect(f"fake://{namespace}") as client:
        yield client


def trained(client: Client, recipe: Recipe) -> tuple[str, Events]:
    """Train to the end of the job; return why it ended, and the events."""
    events: Events = []

    def write(event: str, **values: Any) -> None:
        events.append((event, values))

    with RecipeTrainer(client, recipe, write) as trainer:
        trainer.begin()
        trainer.work()
        return trainer.end(), events


@pytest.mark.parametrize(
    ("kind", "failed"), [(Judged, 0), (MostFail, 19), (AllFail, 20), (EpisodesFail, 19)]
)
def test_the_target_is_not_reached_by_rewards_that_survive(
    client: Client,
    namespace: str,
    kind: type[Recipe],
    failed: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    events: Events = []
    recipe = kind(namespace=namespace)
    with RecipeTrainer(client, recipe, lambda *_, **__: None) as trainer:
        trainer.begin()
        trainer.send_weights()  # as after a step
    caplog.clear()
    with RecipeTrainer(client, recipe, lambda event, **all: events.append((event, all))) as trainer:
        trainer.begin()
        assert bool(trainer.stopped) == (failed == 0)
    [evaluation] = [values for event, values in events if event == "evaluation"]
    assert (evaluation["samples"], evaluation["failed"]) == (20 - failed, failed)
    assert evaluation["reward"] == (None if failed == 20 else 1.0)
    if failed:
        assert evaluation["why_failed"] == "raised ValueError: no answer found"
        assert f"{failed} held-out rewards failed" in caplog.text


@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_target_that_training_rewards_reached_is_remembered(
    client: Client, namespace: str, tmp_path: Path, checkpoints: bool
) -> None:
    options: dict[str, Any] = {"namespace": namespace}
    options["checkpoints"] = str(tmp_path) if checkpoints else ""
    recipe = Counted(**options)
    with ExperienceStream(client, recipe.task_name, namespace=namespace) as stream:
        stream.join_group()
        stream.put_many([[numbered(reward)] for reward in (0, 1, 1, 1, 2, 2, 2, 2)])
        why, _ = trained(client, recipe)
        assert why.startswith("held-out reward 1.000 has reached the target 1")
        for _ in range(2):
            why, events = trained(client, recipe)
            assert "last reward of the job, 1.000 has reached the target 1" in why
            assert "begin anew" in why
            assert not [event for event, _ in events if event == "step"]
        why, events = trained(client, Counted(**options, target_reward=2.0))
        assert "reward 2.000 has reached the target 2" in why
        assert [event for event, _ in events if event == "step"]


@pytest.mark.parametrize("target", [0.0, 0.9, math.inf])
def test_weights_that_nobody_has_trained_reach_no_target(
    client: Client, namespace: str, target: float
) -> None:
    """Also if the trainer that has made them was started again."""
    for _ in range(2):
        recipe = Judged(namespace=namespace, target_reward=target)  # its rewards are 1.0
        with RecipeTrainer(client, recipe, lambda *_, **__: None) as trainer:
            trainer.begin()
            assert not trainer.stopped


@pytest.mark.parametrize(("target", "steps"), [(0.0, 1), (math.inf, 4)])
def test_a_target_of_0_is_reached_by_a_step_and_inf_never(
    client: Client, namespace: str, target: float, steps: int
) -> None:
    recipe = Counted(namespace=namespace, target_reward=target, steps=4)
    with ExperienceStream(client, recipe.task_name, namespace=namespace) as stream:
        stream.join_group()
        stream.put_many([[numbered(reward)] for reward in range(8)])
        _, events = trained(client, recipe)
    assert len([event for event, _ in events if event == "step"]) == steps


def test_the_wait_for_a_batch_that_did_not_come_is_an_event(client: Client, namespace: str) -> None:
    recipe, events = Counted(namespace=namespace, target_reward=math.inf, idle_timeout=1.0), []
    with (
        ExperienceStream(client, recipe.task_name, namespace=namespace) as stream,
        RecipeTrainer(client, recipe, lambda event, **all: events.append((event, all))) as trainer,
    ):
        trainer.begin()
        stream.put_many([[numbered(reward)] for reward in range(3)])
        with pytest.raises(BatchTimeout):
            trainer.work()
    event, values = next(each for each in reversed(events) if "wait_for_batch_s" in each[1])
    assert event == "waited"
    assert 0.9 < values["wait_for_batch_s"] < values["seconds"]
