"""Groups that makers drop by their mean reward are counted, each once, in the trainer's metrics."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Iterator
from statistics import mean
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import redrb
from redrb import BufferItem, Client, ExperienceStream
from redrb.algorithms import Completion
from redrb.errors import ConfigError, RecordError
from redrb.experience import make_experience_batch
from redrb.recipe import EpisodeRecipe, GRPORecipe, Recipe
from redrb.recipe.dropped import DROPPED_BEFORE, Choice, of_made
from redrb.recipe.episode_maker import EpisodeRecipeMaker, encoded_prompt
from redrb.recipe.trainer import RecipeTrainer
from redrb.stream.task.lookup import task_stats
from redrb.train.engines import Trajectory
from tests.networks import PlainActor, seeded
from tests.samples import numbered

Events = list[dict[str, Any]]


class Rollouts(Recipe):
    """Two samples whose mean reward is the number of their prompt."""

    maker_steps = 1
    prompts_per_step = 5
    group_size = 2
    groups = 2
    shuffle = False
    device = "cpu"
    idle_timeout = 10.0
    evaluate_every = 1
    steps = 1
    reward_above = 0.0
    reward_below = 1.0

    numbers = (0.0, 0.5, 1.0, 0.0, 0.25)

    def models(self) -> dict[str, nn.Module]:
        return {"actor": nn.Linear(1, 1)}

    def prompts(self) -> list[dict[str, Any]]:
        return [{"input_ids": [1], "number": number} for number in self.numbers]

    def optimizers(self, models: dict[str, nn.Module]) -> dict[str, Any]:
        return {}

    def step(self, models: Any, optimizers: Any, experience: Any) -> dict[str, Any]:
        return {}

    def rollout(self, models: Any, prompt: Any) -> Any:
        return [numbered(0, reward=torch.tensor(prompt["number"])) for _ in range(2)]


class Completions(GRPORecipe):
    """The same rewards, for completions, which are punished in addition."""

    maker_steps = 1
    prompts_per_step = 5
    group_size = 2
    groups = 2
    shuffle = False
    device = "cpu"
    max_staleness = -1
    idle_timeout = 10.0
    evaluate_every = 1
    steps = 1
    reward_above = 0.0
    reward_below = 1.0
    max_new_tokens = 2
    overlong_cache = 2
    eos_token_id = None
    pad_token_id = 0

    prompts = Rollouts.prompts
    numbers = Rollouts.numbers

    def model(self) -> nn.Module:
        return seeded(PlainActor)

    def decode(self, tokens: torch.Tensor) -> str:
        return str(tokens.tolist())

    def reward(self, completion: Completion) -> float:
        return completion["number"]


class Episodes(EpisodeRecipe):
    """The same rewards, for episodes."""

    prompts_per_step = 1  # one after the other, so that their order is known
    group_size = 2
    groups = 2
    shuffle = False
    device = "cpu"
    max_staleness = -1
    idle_timeout = 10.0
    evaluate_every = 1
    steps = 1
    reward_above = 0.0
    reward_below = 1.0
    max_new_tokens = 2
    eos_token_id = None
    pad_token_id = 0

    prompts, numbers = Rollouts.prompts, Rollouts.numbers
    model, decode = Completions.model, Completions.decode

    async def episode(self, prompt: dict[str, Any], engine: Any) -> BufferItem:
        trajectory = Trajectory(prompt["input_ids"])
        trajectory.sampled(await engine.generate(trajectory.tokens))
        return trajectory.item(reward=prompt["number"])


@pytest.fixture
def client(namespace: str) -> Iterator[Client]:
    with redrb.connect(f"fake://{namespace}") as client:
        yield client


def made(client: Client, recipe: Recipe) -> Events:
    """Publish first weights, and run a maker; returns its events."""
    events: Events = []

    def write(event: str, **values: Any) -> None:
        events.append({"event": event, **values})

    with RecipeTrainer(client, recipe, lambda *_, **__: None) as trainer:
        trainer.begin()
        with recipe.maker(client, write) as maker:
            if isinstance(maker, EpisodeRecipeMaker):
                maker.run([encoded_prompt(recipe, prompt) for prompt in recipe.prompts()])
            else:
                maker.run()
    return events


@pytest.mark.parametrize("kind", [Rollouts, Completions, Episodes])
def test_dropped_groups_count_in_the_trainers_metrics(
    client: Client, namespace: str, kind: type[Recipe]
) -> None:
    """Of the rewards 0, 0.5, 1, 0 and 0.25 makers keep 0.5 and 0.25."""
    recipe = kind(namespace=namespace, worker="m")
    events = made(client, recipe)
    assert [sum(each[name] for each in events) for name in ("groups", "samples")] == [5, 10]
    stats = task_stats(client, recipe.task_name, namespace=namespace, group="default")
    assert (stats.ledger.put, stats.ledger.filtered, stats.ledger.waiting) == (5, 3, 2)
    # the rights of dropped groups have returned
    assert stats.admission is None or stats.admission.held == 0
    events.clear()
    with RecipeTrainer(
        client, recipe, lambda event, **values: events.append({"event": event, **values})
    ) as trainer:
        trainer.begin()
        trainer.work()
    [step] = [each for each in events if each["event"] == "step"]
    assert step["made_reward"] == pytest.approx(0.35)  # 1.75 of five groups
    assert step["kept_fraction"] == pytest.approx(0.4)
    punishment = 1.0 if kind is Completions else 0.0  # each completion has max_new_tokens
    assert step["reward"] == pytest.approx(0.375 - punishment)
    evaluations = [each["reward"] for each in events if each["event"] == "evaluation"]
    assert evaluations[-1] == pytest.approx(0.35)


@pytest.mark.parametrize("kind", [Rollouts, Completions, Episodes])
def test_the_wait_for_a_right_in_which_a_maker_is_ended_is_an_event(
    client: Client, namespace: str, kind: type[Recipe]
) -> None:
    bounds = {"reward_above": -1.0, "reward_below": 2.0, "max_staleness": 0, "maker_steps": 0}
    recipe = kind(namespace=namespace, worker="m", prompts_per_step=1, **bounds)
    events: Events = []

    def write(event: str, **values: Any) -> None:
        events.append({"event": event, **values})

    with RecipeTrainer(client, recipe, lambda *_, **__: None) as trainer:
        trainer.begin()
        with recipe.maker(client, write) as maker:
            threading.Timer(1.5, maker.stop).start()
            maker.run()
    assert {each["event"] for each in events[:-1]} == {"put"}
    assert events[-1]["event"] == "waited"
    assert 0.5 < events[-1]["admission_s"] <= events[-1]["step_s"]


@given(
    groups=st.lists(st.lists(st.floats(-2, 2), min_size=1, max_size=4), max_size=30),
    above=st.floats(-2, 1),
    width=st.floats(0.1, 4),
    broken=st.sampled_from([math.nan, math.inf, -math.inf]),
)
@settings(max_examples=100, deadline=None)
def test_each_sample_is_counted_once(
    groups: list[list[float]], above: float, width: float, broken: float
) -> None:
    choice = Choice(above, above + width)
    kept: list[BufferItem] = []
    done = 0
    for number, group in enumerate(groups, 1):
        rewards = torch.tensor([*group, broken], dtype=torch.float64)
        assert choice.extras(rewards) == {}  # the task drops it, and notes with it
        extras = choice.extras(rewards[:-1])
        assert (extras is not None) == (above < mean(group) < above + width)
        if extras is not None:
            kept += [numbered(0, reward=torch.tensor(reward)) for reward in group]
            kept[-len(group)].extras |= extras
            done = number
    assert choice.dropped == sum(not above < mean(group) < above + width for group in groups)
    if kept:
        made = [reward for group in groups[:done] for reward in group]
        found = of_made(make_experience_batch(kept))
        assert found["made_reward"] == pytest.approx(sum(made) / len(made), abs=1e-5)
        assert found["kept_fraction"] == pytest.approx(len(kept) / len(made))


@pytest.mark.parametrize("note", [3, "ab", [1], [1, 2, 3], ["a", "b"], {"a": 1}, None])
def test_a_note_of_another_writer_is_refused(note: Any) -> None:
    batch = make_experience_batch([numbered(1, extras={DROPPED_BEFORE: note})])
    with pytest.raises(RecordError, match="dropped_before"):
        of_made(batch)


@pytest.mark.parametrize(
    "bounds", [{"reward_above": 1.0}, {"reward_above": math.nan}, {"reward_below": math.nan}]
)
def test_bounds_that_leave_no_group_are_refused(bounds: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="reward-above"):
        Rollouts(**bounds)


def test_nothing_is_noted_without_bounds(client: Client, namespace: str) -> None:
    recipe = Rollouts(
        namespace=namespace, worker="m", reward_above=-math.inf, reward_below=math.inf
    )
    made(client, recipe)
    stream = ExperienceStream(client, recipe.task_name, namespace=namespace)
    with stream, stream.take(5, timeout=0) as lease:
        assert [item.extras for item in lease.items()] == [{}] * 10


@pytest.mark.parametrize(
    ("kind", "cache", "said"),
    [(Completions, 3, "at most --max-new-tokens"), (Episodes, 1, "episode gives its whole reward")],
)
def test_a_punishment_that_cannot_be_is_refused_with_the_settings(
    kind: type[GRPORecipe], cache: int, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        kind(worker="m", overlong_cache=cache)


@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("size", [1, 3, 7, 10, 100])
def test_bounds_are_compared_in_the_type_of_the_rewards(kind: torch.dtype, size: int) -> None:
    dice = random.Random(size)
    for bound in [0.1, 0.3, 1 / 3, 0.7, -0.1, 1.0, *(dice.uniform(-2, 2) for _ in range(20))]:
        if kind is torch.int64:
            bound = round(bound)
        at = torch.tensor([bound] * size, dtype=torch.float64).to(kind)
        step = max(abs(bound), 1) * (1 if kind is torch.int64 else 0.02)
        over, under = at + step, at - step
        kept = [Choice(bound, math.inf).extras(each) == {} for each in (under, at, over)]
        assert kept == [False, False, True]
        kept = [Choice(-math.inf, bound).extras(each) == {} for each in (under, at, over)]
        assert kept == [True, False, False]


@pytest.mark.parametrize("kind", [torch.float64, torch.float32])
def test_a_share_of_successes_equals_its_bound(kind: torch.dtype) -> None:
    for size in range(1, 50):
        for right in range(size + 1):
            rewards = torch.tensor([1.0] * right + [0.0] * (size - right), dtype=kind)
            share = right / size
            assert Choice(share, math.inf).extras(rewards) is None
            assert Choice(-math.inf, share).extras(rewards) is None
            assert Choice(share - 0.001, share + 0.001).extras(rewards) == {}
