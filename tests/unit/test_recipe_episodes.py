"""Episodes of a recipe: what is masked, which weights made a token, and what a failure costs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

import redrb
from redrb.engines import Trajectory
from redrb.recipe.episode_groups import EpisodeGroups
from redrb.recipe.local_engine import LocalEngine
from redrb.recipes.multiturn import Multiturn, added

RESULT, END = 7, 4
"""A token of the tool, which the policy may also sample; the token that ends a turn."""


class Fixed(Multiturn):
    """Two turns of up to two tokens, with two tokens of a tool between them."""

    group_size = 4
    width = 16
    failing = ""

    async def episode(self, prompt: dict[str, Any], engine: LocalEngine) -> redrb.BufferItem:
        trajectory = Trajectory(prompt["input_ids"])
        trajectory.sampled(await engine.generate(trajectory.tokens, max_new_tokens=2))
        if prompt["prompt"] == self.failing:
            raise ValueError("the tool is broken")
        trajectory.given([RESULT, RESULT])
        trajectory.sampled(await engine.generate(trajectory.tokens, max_new_tokens=2))
        return trajectory.item(reward=float(trajectory.tokens[-1]))


@pytest.fixture
def recipe() -> Fixed:
    return Fixed(worker="maker")


def experience_of(
    recipe: Fixed, **options: Any
) -> tuple[dict[str, torch.nn.Module], redrb.Experience]:
    torch.manual_seed(0)
    models = recipe.models()
    maker = recipe.experience_maker(models, models["actor"] if recipe.beta else None)
    assert isinstance(maker, EpisodeGroups)
    maker.version = lambda: 5
    options = {**recipe.generation(torch.Generator().manual_seed(1)), **options}
    prompts = [{"prompt": "1+2+3=", "answer": "6"}, {"prompt": "9+", "answer": "9"}]
    return models, maker.make_experience(prompts, **options)


def tool_tokens(experience: redrb.Experience) -> torch.Tensor:
    """Return where tokens of the tool are among the actions: those after the first turn."""
    versions, mask = experience.token_versions, experience.action_mask
    assert versions is not None
    assert mask is not None
    assert experience.attention_mask is not None
    kept = experience.attention_mask[:, -mask.shape[1] :].bool()
    return kept & ~mask & (versions == -1)


def test_tokens_of_the_tool_are_masked_and_have_no_gradient(recipe: Fixed) -> None:
    models, experience = experience_of(recipe)
    mask, log_probs = experience.action_mask, experience.action_log_probs
    assert mask is not None
    assert log_probs is not None
    for item in redrb.split_experience_batch(experience):
        given = ~item.action_mask
        assert given.sum() == 2
        assert item.sequences[-len(given) :][given].tolist() == [RESULT, RESULT]
        assert item.action_log_probs[given].tolist() == [0.0, 0.0]
        assert (item.action_log_probs[item.action_mask] < 0).all()
        assert item.token_versions.tolist() == [-1 if tool else 5 for tool in given]
    metrics = recipe.step(models, recipe.optimizers(models), experience)
    assert metrics["ratio_max"] == pytest.approx(1.0, abs=1e-5)

    def gradients(noise: float) -> list[torch.Tensor]:
        models, experience = experience_of(recipe)
        found = experience.action_log_probs
        found += noise * tool_tokens(experience)
        experience.advantages = torch.linspace(-1, 1, len(experience))[:, None].expand(mask.shape)
        experience.advantages = experience.advantages + noise * tool_tokens(experience)
        actor = models["actor"]
        step = recipe.algorithm(models, {"actor": torch.optim.SGD(actor.parameters(), lr=0.0)})
        step(experience)
        return [each.grad for each in actor.parameters() if each.grad is not None]

    assert any(gradient.any() for gradient in gradients(0.0))
    for plain, noisy in zip(gradients(0.0), gradients(3.0), strict=True):
        assert plain.equal(noisy)


def test_tokens_have_the_version_of_the_weights_that_computed_them(recipe: Fixed) -> None:
    loaded = iter(range(10, 20))
    _, experience = experience_of(recipe, before_token=lambda: next(loaded))
    for item in redrb.split_experience_batch(experience):
        versions = item.token_versions.tolist()
        first = versions.index(-1)
        # all episodes of a turn are one batch: its columns are computed one after the other
        assert versions == [10, 11][:first] + [-1, -1] + [12, 13][: len(versions) - first - 2]
        assert item.policy_version == 10


def test_advantages_keys_and_reference_of_a_group() -> None:
    _, experience = experience_of(Fixed(worker="maker", beta=0.1))
    assert experience.group_id == ["maker-1"] * 4 + ["maker-2"] * 4
    assert [extras["answer"] for extras in experience.extras] == ["6"] * 4 + ["9"] * 4
    assert experience.advantages.view(2, 4).sum(1).tolist() == pytest.approx([0, 0], abs=1e-5)
    reference = experience.tensors["reference_log_probs"]
    torch.testing.assert_close(reference, experience.action_log_probs, rtol=1e-4, atol=1e-5)


def test_an_episode_that_raises_costs_its_group(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Fixed):
        failing = "9+"

    _, experience = experience_of(Failing(worker="maker"))
    assert experience.reward.isfinite().tolist() == [True] * 4 + [False]
    assert "the tool is broken" in caplog.text


def test_an_episode_that_lasts_too_long_costs_its_group(caplog: pytest.LogCaptureFixture) -> None:
    class Endless(Fixed):
        episode_timeout = 0.01

        async def episode(self, prompt: dict[str, Any], engine: LocalEngine) -> redrb.BufferItem:
            await asyncio.Event().wait()
            raise AssertionError

    _, experience = experience_of(Endless(worker="maker"))
    assert experience.reward.isfinite().tolist() == [False, False]
    assert "TimeoutError" in caplog.text


def test_the_calculator_adds_to_the_result_before() -> None:
    assert added("", "3+8?") == "11"
    assert added("11", "+5?") == "16"
    assert [added("11", call) for call in ("?", "+?", "=1?", "3")] == ["", "", "", "3"]
