"""Recipes whose makers sample from an inference server: a real one, with a tiny causal model."""

from __future__ import annotations

import asyncio
import copy
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

import redrb
from redrb.errors import ConfigError
from redrb.recipe import EpisodeRecipe, GRPORecipe, character_tokenizer
from redrb.recipe.episode_maker import EpisodeRecipeMaker, encoded_prompt
from redrb.recipe.local_engine import LocalEngine
from redrb.recipe.maker import RecipeMaker
from redrb.recipe.served import ServedEngine
from redrb.train.broadcast import Broadcast
from redrb.train.engines import Trajectory
from tests.engine_server import EngineServer, experts_of, log_probs_of, tiny_model

LETTERS = "abcdefghijkl"
PROMPTS = [{"prompt": "abc", "answer": "a"}, {"prompt": "de", "answer": "b"}]


@pytest.fixture
def server():
    with EngineServer() as server:
        yield server


@pytest.fixture
def client(namespace: str):
    with redrb.connect(f"fake://{namespace}") as client:
        yield client


@pytest.fixture
def model(tmp_path: Path) -> str:
    """The folder of a model with other weights than the server has."""
    folder = str(tmp_path / "model")
    tiny_model(1).save_pretrained(folder)
    character_tokenizer(LETTERS).save_pretrained(folder)
    return folder


class Letters(GRPORecipe):
    """Rewards the letter of the prompt."""

    group_size = 3
    max_new_tokens = 4
    device = "cpu"
    extras = ("answer",)
    weights_dtype = "float32"
    weights_timeout = 20.0
    folder = ""

    def model(self) -> str:
        return self.folder

    def prompts(self) -> list[dict[str, Any]]:
        return PROMPTS

    def reward(self, completion: Any) -> float:
        return float(completion.text.count(completion["answer"]))


class Together(Letters):
    """Scores a group at once, by a coroutine function."""

    async def rewards(self, completions: Any) -> list[float]:
        await asyncio.sleep(0)
        return [float(number) for number, _ in enumerate(completions)]


class Failing(Letters):
    """Its reward fails for one of the prompts."""

    def reward(self, completion: Any) -> float:
        return 1 / (completion["answer"] == "a")


class Turns(EpisodeRecipe):
    """Two turns with a token of a tool between them."""

    group_size = 2
    device = "cpu"
    weights_dtype = "float32"
    weights_timeout = 20.0
    folder = ""

    def model(self) -> str:
        return self.folder

    def prompts(self) -> list[dict[str, Any]]:
        return PROMPTS

    async def episode(self, prompt: dict[str, Any], engine: Any) -> redrb.BufferItem:
        trajectory = Trajectory(prompt["input_ids"])
        trajectory.sampled(await engine.generate(trajectory.tokens, max_new_tokens=2))
        trajectory.given([7])
        trajectory.sampled(await engine.generate(trajectory.tokens, max_new_tokens=2))
        return trajectory.item(reward=float(trajectory.tokens[-1]))


class RoutedTurns(Turns):
    """Three turns, in which each row of experts is asked for once."""

    async def episode(self, prompt: dict[str, Any], engine: Any) -> redrb.BufferItem:
        trajectory = Trajectory(prompt["input_ids"])
        for _ in range(3):
            more = {"max_new_tokens": 2, "routed_tokens": trajectory.routed_tokens}
            trajectory.sampled(await engine.generate(trajectory.tokens, **more))
            trajectory.given([7])
        return trajectory.item(reward=float(trajectory.tokens[-2]))


def of(
    kind: type[GRPORecipe],
    model: str,
    server: EngineServer,
    tmp_path: Path,
    namespace: str = "served",
    **settings: Any,
) -> GRPORecipe:
    given = {"engine": "vllm", "max_staleness": -1, **settings}
    folder = str(tmp_path / "versions")
    places = {"engine_url": server.url, "engine_folder": folder}
    recipe = kind(namespace=namespace, worker="maker-1", **places, **given)
    object.__setattr__(recipe, "folder", model)
    return recipe


def publish(client: redrb.Client, recipe: GRPORecipe, models: Any, **options: Any) -> None:
    trainer = Broadcast(client, recipe.namespace, recipe.weights_name, [], **options)
    trainer.push(models, fully=True, lora_only=recipe.lora_rank > 0)


def made(
    client: redrb.Client, recipe: GRPORecipe, owner: redrb.Client | None = None
) -> list[list[redrb.BufferItem]]:
    """Return the groups that a maker of the recipe makes of all prompts, taken by the owner."""
    events: list[str] = []
    maker = recipe.maker(client, lambda event, **_: events.append(event))
    assert isinstance(maker, EpisodeRecipeMaker)
    task, namespace = recipe.task_name, recipe.namespace
    with redrb.ExperienceStream(owner or client, task, namespace=namespace) as stream:
        stream.join_group()
        with maker:
            maker.run([encoded_prompt(recipe, prompt) for prompt in recipe.prompts()])
        count = stream.count()
        with stream.take(count, timeout=0) as lease:
            return lease.groups()


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_groups_are_sampled_with_the_published_weights_and_scored(
    server, client, model, tmp_path, engine
):
    recipe = of(Letters, model, server, tmp_path, engine=engine)
    publish(client, recipe, recipe.models())
    groups = made(client, recipe)
    assert sorted(group[0].extras["answer"] for group in groups) == ["a", "b"]
    for item in (item for group in groups for item in group):
        assert item.extras == {"answer": item.extras["answer"]}
        assert item.tags["maker"] == "maker-1"
        assert item.policy_version == 1
        assert not list((tmp_path / "versions").iterdir())  # no memory of /dev/shm is left
        start = len(item.sequences) - len(item.action_mask)
        text = recipe.decode(item.sequences[start:])
        assert item.reward == text.count(item.extras["answer"])
        expected = log_probs_of(tiny_model(1), item.sequences.tolist(), start, 1.0)
        assert torch.allclose(item.action_log_probs, expected, atol=1e-4)
    for group in groups:
        assert abs(sum(float(item.advantages) for item in group)) < 1e-5
    assert all(body.get("stop_token_ids", [2]) == [2] for body in server.bodies)


def test_the_settings_of_sampling_reach_the_server(server, client, model, tmp_path):
    settings = {"temperature": 0.5, "top_k": 3, "top_p": 0.9}
    recipe = of(Letters, model, server, tmp_path, **settings)
    publish(client, recipe, recipe.models())
    made(client, recipe)
    for body in server.bodies:
        assert settings.items() <= body.items()
        assert (body["model"], body["max_tokens"]) == (model, 4)


def test_the_completions_of_a_group_can_be_scored_together(server, client, model, tmp_path):
    recipe = of(Together, model, server, tmp_path)
    publish(client, recipe, recipe.models())
    for group in made(client, recipe):
        assert [float(item.reward) for item in group] == [0.0, 1.0, 2.0]


def test_a_reward_that_fails_costs_its_group(server, client, model, tmp_path, caplog):
    recipe = of(Failing, model, server, tmp_path)
    publish(client, recipe, recipe.models())
    [group] = made(client, recipe)
    assert group[0].extras["answer"] == "a"
    assert [line for line in caplog.text.splitlines() if "ZeroDivisionError" in line]
    with redrb.ExperienceStream(client, recipe.task_name, namespace="served") as stream:
        assert stream.stats().ledger.filtered == 1


def test_samples_have_the_log_probs_of_the_reference(server, client, model, tmp_path):
    recipe = of(Letters, model, server, tmp_path, beta=0.1)
    models = recipe.models()
    name = recipe.reference_name
    redrb.WeightPublisher(client, name, namespace="served").publish(tiny_model(2))
    publish(client, recipe, models)
    for item in (item for group in made(client, recipe) for item in group):
        start = len(item.sequences) - len(item.action_mask)
        expected = log_probs_of(tiny_model(2), item.sequences.tolist(), start, 1.0)
        found = item.tensors["reference_log_probs"]  # it keeps the padding of its group
        padding = len(found) - len(expected)
        assert torch.allclose(found[padding:], expected, atol=1e-4)
        assert not found[:padding].any()


def test_episodes_sample_from_the_server(server, client, model, tmp_path):
    recipe = of(Turns, model, server, tmp_path)
    publish(client, recipe, recipe.models())
    groups = made(client, recipe)
    assert [len(group) for group in groups] == [2, 2]
    for item in (item for group in groups for item in group):
        start = len(item.sequences) - len(item.action_mask)
        given = (~item.action_mask).nonzero().flatten().tolist()
        assert [int(item.sequences[start + place]) for place in given] == [7]


def test_routed_experts_of_known_tokens_are_not_sent_again(server, client, model, tmp_path):
    server.experts = "<u2"
    recipe = of(RoutedTurns, model, server, tmp_path)
    publish(client, recipe, recipe.models())
    groups = made(client, recipe)
    assert [len(group) for group in groups] == [2, 2]
    for item in (item for group in groups for item in group):
        last = int(item.sequences.shape[0]) - 2
        wanted = torch.from_numpy(experts_of(item.sequences.tolist(), "<u2"))
        wanted[last:] = 0
        assert torch.equal(item.tensors["routed_experts"], wanted)
    later = [body for body in server.bodies if "routed_experts_prompt_start" in body]
    assert len(later) == 2 * len(server.bodies) / 3
    for body in later:  # neither the last sampled token nor the tool's has a row yet
        assert body["routed_experts_prompt_start"] == len(body["prompt"]) - 2


def test_episodes_give_each_engine_of_recipes_the_same_arguments():
    of_server, local = ServedEngine.generate, LocalEngine.generate
    assert inspect.signature(of_server) == inspect.signature(local)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT's
def test_an_adapter_reaches_the_server_merged_and_a_later_one_replaces_it(
    server, client, model, tmp_path
):
    pytest.importorskip("peft")
    recipe = of(Letters, model, server, tmp_path, lora_rank=2)
    actor: Any = recipe.models()["actor"]
    whole = {name for name, _ in tiny_model(1).named_parameters()}
    trained = [name for name, each in actor.named_parameters() if each.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)
    trainer = Broadcast(client, "served", recipe.weights_name, [])
    kinds = []
    for scale in (0.5, -1.0):
        with torch.no_grad():
            for name, each in actor.named_parameters():
                if "lora_B" in name:
                    each.fill_(scale)
        trainer.push({"actor": actor}, fully=False, lora_only=True)
        kinds.append([each.kind for each in trainer.published])
        groups = made(client, recipe)
        merged = tiny_model(1)
        merged.load_state_dict(copy.deepcopy(actor).merge_and_unload().state_dict())
        assert {name for name, _ in server.model.named_parameters()} == whole
        for name, each in server.model.state_dict().items():
            assert torch.allclose(each, merged.state_dict()[name], atol=1e-5), name
        for item in (item for group in groups for item in group):
            assert item.policy_version == trainer.version
    assert kinds == [["full", "lora"], ["lora"]]


def test_a_trainer_with_other_settings_ends_the_maker(server, client, model, tmp_path, monkeypatch):
    monkeypatch.setattr("redrb.train.announcements.GRACE_S", 0.5)
    recipe = of(Letters, model, server, tmp_path)
    publish(client, recipe, recipe.models(), settings={"max_new_tokens": "5"})
    with pytest.raises(ConfigError, match="max_new_tokens is 5 there and 4 here"):
        made(client, recipe)
    assert not server.bodies


def test_a_model_that_no_server_can_load_is_refused(server, client, model, tmp_path):
    class Module(Letters):
        def model(self) -> Any:
            return tiny_model(1)

    recipe = of(Module, model, server, tmp_path)
    with pytest.raises(ConfigError, match="--engine vllm needs a model that the server can load"):
        recipe.maker(client, lambda *_: None)


def test_without_a_server_the_maker_has_its_own_model(server, client, model, tmp_path):
    recipe = of(Letters, model, server, tmp_path, engine="local")
    maker = recipe.maker(client, lambda *_: None)
    assert isinstance(maker, RecipeMaker)
    maker.close()


def test_the_role_of_episode_makers_is_enough(log_in, store, server, model, namespace, tmp_path):
    recipe = of(Letters, model, server, tmp_path, namespace)
    publish(store, recipe, recipe.models())
    client = log_in("episode-maker", tasks=(recipe.task_name,), weights=recipe.weights_name)
    assert len(made(client, recipe, store)) == 2


def test_long_completions_are_punished_and_groups_out_of_bounds_dropped(
    server, client, model, tmp_path
):
    options = {"overlong_cache": 4, "advantages": "rloo"}
    recipe = of(Together, model, server, tmp_path, reward_above=0.5, **options)
    publish(client, recipe, recipe.models())
    groups = made(client, recipe)
    assert len(groups) == len(PROMPTS)
    for group in groups:
        rewards = []
        for raw, item in enumerate(group):
            assert item.tensors["raw_reward"] == raw
            rewards.append(raw - len(item.action_log_probs) / 4)
        assert [float(item.reward) for item in group] == pytest.approx(rewards)
        others = [(sum(rewards) - reward) / 2 for reward in rewards]
        expected = [reward - other for reward, other in zip(rewards, others, strict=True)]
        assert [float(item.advantages) for item in group] == pytest.approx(expected)
