"""Episodes of a recipe: what is masked, which weights made a token, and what a failure costs."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import redrb
from redrb.experience import make_experience_batch
from redrb.recipe.episode_maker import encoded_prompt
from redrb.recipe.examples.multiturn import Multiturn, added
from redrb.recipe.local_engine import LocalEngine
from redrb.train.broadcast import Broadcast
from redrb.train.engines import Trajectory
from redrb.train.following import MakerWeights

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


PROMPTS = [{"prompt": "1+2+3=", "answer": "6"}, {"prompt": "9+", "answer": "9"}]


class Made:
    """A recipe's maker with published weights of version 1, on a server of its own."""

    def __init__(self, recipe: Fixed, client: redrb.Client) -> None:
        torch.manual_seed(0)
        self.recipe, self.models = recipe, recipe.models()
        if recipe.beta:
            name = recipe.reference_name
            redrb.WeightPublisher(client, name).publish(self.models["actor"])
        Broadcast(client, "default", recipe.weights_name, []).push(self.models, fully=True)
        self.maker = recipe.maker(client, self.write)
        self.events: list[dict[str, Any]] = []
        self.stream = redrb.ExperienceStream(client, recipe.task_name)
        self.stream.join_group()

    def write(self, event: str, **values: object) -> None:
        self.events.append({"event": event, **values})

    def run(self, prompts: Sequence[dict[str, Any]] = PROMPTS) -> redrb.Experience:
        encoded = [encoded_prompt(self.recipe, prompt) for prompt in prompts]
        with self.stream, self.maker:
            self.maker.run(encoded)
            groups = self.groups()
        return make_experience_batch([item for group in groups for item in group])

    def groups(self) -> list[list[redrb.BufferItem]]:
        count = self.stream.count()
        if not count:
            return []
        with self.stream.take(count, timeout=0) as lease:
            return sorted(lease.groups(), key=lambda group: str(group[0].extras["answer"]))


@pytest.fixture
def client(namespace: str) -> Iterator[redrb.Client]:
    with redrb.connect(f"fake://{namespace}") as client:
        yield client


@pytest.fixture
def recipe() -> Fixed:
    return Fixed(worker="maker", max_staleness=-1, weights_dtype="float32")


def tool_tokens(experience: redrb.Experience) -> torch.Tensor:
    """Return where tokens of the tool are among the actions: those after the first turn."""
    versions, mask = experience.token_versions, experience.action_mask
    assert versions is not None
    assert mask is not None
    assert experience.attention_mask is not None
    kept = experience.attention_mask[:, -mask.shape[1] :].bool()
    return kept & ~mask & (versions == -1)


def test_tokens_of_the_tool_are_masked_and_have_no_gradient(
    recipe: Fixed, client: redrb.Client
) -> None:
    made = Made(recipe, client)
    models, experience = made.models, made.run()
    mask, fresh = experience.action_mask, copy.deepcopy(experience)
    assert mask is not None
    for item in redrb.split_experience_batch(experience):
        given = ~item.action_mask
        assert given.sum() == 2
        assert item.sequences[-len(given) :][given].tolist() == [RESULT, RESULT]
        assert item.action_log_probs[given].tolist() == [0.0, 0.0]
        assert (item.action_log_probs[item.action_mask] < 0).all()
        assert item.token_versions.tolist() == [-1 if tool else 1 for tool in given]
    actor, saved = models["actor"], copy.deepcopy(models["actor"].state_dict())
    metrics = recipe.step(models, recipe.optimizers(models), copy.deepcopy(experience))
    assert metrics["ratio_max"] == pytest.approx(1.0, abs=1e-5)
    actor.load_state_dict(saved)

    def gradients(noise: float) -> list[torch.Tensor]:
        experience = copy.deepcopy(fresh)
        found = experience.action_log_probs
        assert found is not None
        found += noise * tool_tokens(experience)
        experience.advantages = torch.linspace(-1, 1, len(experience))[:, None].expand(mask.shape)
        experience.advantages = experience.advantages + noise * tool_tokens(experience)
        step = recipe.algorithm(models, {"actor": torch.optim.SGD(actor.parameters(), lr=0.0)})
        step(experience)
        return [each.grad for each in actor.parameters() if each.grad is not None]

    assert any(gradient.any() for gradient in gradients(0.0))
    for plain, noisy in zip(gradients(0.0), gradients(3.0), strict=True):
        assert plain.equal(noisy)


def test_tokens_have_the_version_of_the_weights_that_computed_them(
    recipe: Fixed, client: redrb.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = iter(range(10, 20))
    options = {"before_token": lambda: next(loaded)}
    monkeypatch.setattr(MakerWeights, "begin_batch", lambda _: (1, options))
    experience = Made(recipe, client).run(PROMPTS[:1])
    for item in redrb.split_experience_batch(experience):
        assert item.token_versions is not None
        versions = item.token_versions.tolist()
        first = versions.index(-1)
        # all episodes of a turn are one batch: its columns are computed one after the other
        assert versions == [10, 11][:first] + [-1, -1] + [12, 13][: len(versions) - first - 2]
        assert item.policy_version == 10


def test_advantages_keys_and_reference_of_a_group(recipe: Fixed, client: redrb.Client) -> None:
    made = Made(replace(recipe, beta=0.1, prompts_per_step=2), client)
    experience = made.run()
    assert sorted(experience.group_id) == ["maker-1"] * 4 + ["maker-2"] * 4
    assert [extras["answer"] for extras in experience.extras] == ["6"] * 4 + ["9"] * 4
    assert experience.advantages.view(2, 4).sum(1).tolist() == pytest.approx([0, 0], abs=1e-5)
    reference = experience.tensors["reference_log_probs"]
    torch.testing.assert_close(reference, experience.action_log_probs, rtol=1e-4, atol=1e-5)
    [event] = made.events
    assert (event["event"], event["groups"], event["samples"]) == ("put", 2, 8)
    assert event["policy_version"] == 1


def test_a_failed_or_too_long_episode_costs_its_group_alone(
    client: redrb.Client, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits, limit_of = dict[Any, asyncio.Timeout](), asyncio.timeout

    def noted(seconds: float) -> asyncio.Timeout:
        return limits.setdefault(asyncio.current_task(), limit_of(seconds))

    class Failing(Fixed):
        failing = "9+"
        max_staleness = -1
        episode_timeout = 600

        async def episode(self, prompt: dict[str, Any], engine: LocalEngine) -> redrb.BufferItem:
            item = await super().episode(prompt, engine)
            if prompt["answer"] == "endless":
                limits[asyncio.current_task()].reschedule(0)  # its time is up now
                await asyncio.Event().wait()
            if prompt["answer"] == "none":
                item.reward = torch.tensor(float("nan"))
            return item

    prompts = [*PROMPTS, {"prompt": "1=", "answer": "endless"}, {"prompt": "2=", "answer": "none"}]
    monkeypatch.setattr("redrb.recipe.episode_maker.asyncio.timeout", noted)
    made = Made(Failing(worker="maker"), client)
    experience = made.run(prompts)
    assert [extras["answer"] for extras in experience.extras] == ["6"] * 4
    assert "the tool is broken" in caplog.text
    assert "TimeoutError" in caplog.text
    assert "its rewards are [nan" in caplog.text


def test_a_group_is_sent_when_it_ends_and_others_are_finished_later(client: redrb.Client) -> None:
    """One group's tool answers at once; the other's not before the maker ends."""
    begun, resumed = asyncio.Event(), []

    class Slow(Fixed):
        max_staleness = -1

        async def episode(  # type: ignore[override]
            self, prompt: dict[str, Any], engine: LocalEngine, partial: Any = None
        ) -> redrb.BufferItem:
            trajectory = Trajectory(prompt["input_ids"], partial)
            resumed.append(partial is not None)
            if partial is None:
                trajectory.sampled(await engine.generate(trajectory.tokens, max_new_tokens=2))
                if prompt["answer"] == "9":
                    begun.set()
                    while not engine.ended:
                        await asyncio.sleep(0)
            trajectory.sampled(await engine.generate(trajectory.tokens, max_new_tokens=2))
            if trajectory.aborted:
                return trajectory.item()
            return trajectory.item(reward=1.0, extras={"number": prompt["prompt"]})

    first, stored = Made(Slow(worker="maker"), client), []

    def stop_when_one_is_there() -> None:
        with redrb.ExperienceStream(client, "slow") as stream, stream.take(1, timeout=20) as lease:
            stored.extend(lease.groups())
        first.maker.stop("enough")

    watching = threading.Thread(target=stop_when_one_is_there)
    watching.start()
    with first.maker:
        first.maker.run([encoded_prompt(first.recipe, prompt) for prompt in PROMPTS])
    watching.join()
    assert [item.extras["answer"] for item in stored[0]] == ["6"] * 4
    assert (first.stream.count("aborted"), first.stream.count()) == (1, 0)
    first.stream.close()
    resumed.clear()
    second = Made(Slow(worker="second"), client)
    experience = second.run([])
    assert [extras["answer"] for extras in experience.extras] == ["9"] * 4
    assert resumed == [True] * 4
    mask = experience.action_mask
    assert mask is not None
    assert mask.sum(1).max() <= 4


def test_an_error_of_sampling_ends_the_maker(recipe: Fixed, client: redrb.Client) -> None:
    made = Made(recipe, client)
    made.maker._models["actor"].forward = None  # type: ignore[union-attr,assignment]
    with pytest.raises(TypeError, match="callable"):
        made.run()


def test_the_calculator_adds_to_the_result_before() -> None:
    assert added("", "3+8?") == "11"
    assert added("11", "+5?") == "16"
    assert [added("11", call) for call in ("?", "+?", "=1?", "3")] == ["", "", "", "3"]
