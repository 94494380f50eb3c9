"""Makers refuse the weights of a trainer that was started with other settings."""

from __future__ import annotations

import logging
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch import nn

import redrb
from redrb import Client, ConfigError
from redrb.connection.stop import Stop
from redrb.errors import WeightTimeout
from redrb.recipe import GRPORecipe, option
from redrb.recipe.job_settings import agreed_settings
from redrb.recipe.trainer import RecipeTrainer
from redrb.train import announcements as agreement
from redrb.train.broadcast import Broadcast
from redrb.train.following import MakerWeights
from tests.counting_recipe import Counting

SIX, TEN = {"base": "6", "digits": "4"}, {"base": "10", "digits": "4"}
DIFFERS = "trainer 't' has other settings than maker 'm': base is 6 there and 10 here. Start all"


class Workers:
    """A maker with base 10, and trainers."""

    def __init__(self, client: Client, namespace: str) -> None:
        self.client, self.namespace = client, namespace
        self.model = nn.Linear(1, 1)

    def trainer(
        self, settings: dict[str, str] | None, makers: list[str] | None = None
    ) -> Broadcast:
        return Broadcast(self.client, self.namespace, "t", makers or [], settings=settings)

    def publish(self, trainer: Broadcast) -> int:
        return trainer.push({"actor": self.model}, fully=True)

    def maker(self, settings: dict[str, str] = TEN) -> MakerWeights:
        place = (self.client, self.namespace, "m", {"actor": nn.Linear(1, 1)}, Stop())
        return MakerWeights(*place, follow="t", first_timeout=60.0, agree=settings)


@pytest.fixture
def workers(client: Client, namespace: str) -> Workers:
    return Workers(client, namespace)


@pytest.fixture
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "GRACE_S", 0.0)


@pytest.mark.usefixtures("no_grace")
@pytest.mark.parametrize("makers", [[], ["m"]])
def test_a_maker_refuses_a_trainer_with_other_settings_that_was_there_before(
    workers: Workers, makers: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    workers.publish(workers.trainer(SIX, makers))
    maker = workers.maker()
    with pytest.raises(ConfigError, match=DIFFERS):
        maker.wait_until_initialised()
    assert maker.version is None
    assert "This maker makes nothing, and ends in 0 s unless a trainer with its" in caplog.text


def test_a_maker_that_waits_refuses_a_trainer_with_other_settings_at_once(
    workers: Workers,
) -> None:
    """The trainer announces its settings before it has weights."""
    maker = workers.maker()
    assert not maker._fetch_next(0.0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(maker.wait_until_initialised)
        workers.trainer(SIX)
        with pytest.raises(ConfigError, match=DIFFERS):
            waiting.result(30)


def test_a_maker_that_finds_the_settings_of_an_earlier_run_waits_for_its_successor(
    workers: Workers, caplog: pytest.LogCaptureFixture
) -> None:
    workers.publish(workers.trainer(SIX))
    maker = workers.maker()
    assert maker._fetch_next(0.0)
    assert maker.version is None
    successor = workers.trainer(TEN)
    maker.wait_until_initialised()  # the successor goes on from these weights
    assert maker.version == 1
    workers.publish(successor)
    maker.load_announced()
    assert maker.version == 2
    assert len([each for each in caplog.records if each.levelno == logging.WARNING]) == 1


def test_a_working_maker_ends_when_a_trainer_with_other_settings_has_started(
    workers: Workers,
) -> None:
    workers.publish(workers.trainer(TEN))
    maker = workers.maker()
    maker.wait_until_initialised()
    workers.publish(workers.trainer(TEN))  # a restart
    maker.load_announced()
    assert maker.version == 2
    workers.trainer(SIX)
    with pytest.raises(ConfigError, match=DIFFERS):
        maker.load_announced()
    assert maker.version == 2


@pytest.mark.parametrize(("trainer", "maker"), [({}, TEN), (SIX, {})])
def test_workers_without_settings_agree_with_all(
    workers: Workers, trainer: dict[str, str], maker: dict[str, str]
) -> None:
    workers.publish(workers.trainer(trainer))
    follower = workers.maker(maker)
    follower.wait_until_initialised()
    assert follower.version == 1


@pytest.mark.usefixtures("no_grace")
def test_weights_that_are_announced_after_a_maker_has_loaded_them_are_its_first(
    workers: Workers,
) -> None:
    """As those of `redrb weights put`, or of a trainer that was killed before it announced them."""
    with redrb.WeightPublisher(workers.client, "t", namespace=workers.namespace) as publisher:
        publisher.publish({"actor": workers.model})
    trainer = workers.trainer(TEN)
    maker = workers.maker()
    maker.load_announced()
    assert (maker.version, maker.initialised) == (1, False)
    assert trainer.take_over({"actor": workers.model}) == 1
    assert maker.wait_until_initialised()


def test_the_reward_of_an_earlier_run_with_other_settings_ends_no_job(workers: Workers) -> None:
    first = workers.trainer(SIX)
    workers.publish(first)
    first.end_job("the target is reached", 1.0)
    assert workers.trainer(SIX).reward_at_end == 1.0
    first.end_job("the target is reached", 1.0)
    assert workers.trainer(TEN).reward_at_end is None
    assert workers.trainer(TEN).reward_at_end is None


# recipes


class Based(Counting):
    """Counts in a base."""

    base: int = option(10, "of the numbers")
    rate: float = option(1.0, "of learning", agree=False)
    dataset: str = option("", "of prompts")


def test_the_settings_that_must_agree_are_those_of_the_recipe() -> None:
    secret = "https://user:password@host/data"
    found = agreed_settings(Based(worker="m", steps=3, group_size=9, dataset=secret, rate=0.5))
    assert found.pop("dataset").startswith("a text with the digest ")
    bounds = {"reward_above": "-Infinity", "reward_below": "Infinity"}
    assert found == {"base": "10", "fails": '""', "stuck": '""', "hangs": '""', **bounds}
    assert agreed_settings(Based(base=6))["base"] == "6"
    language = {"max_new_tokens", "temperature", "top_k", "top_p"}

    class Sums(GRPORecipe):
        def model(self) -> Any:
            return None

        def prompts(self) -> list[Any]:
            return []

        def reward(self, completion: Any) -> float:
            return math.nan

    advantages = {"beta", "lora_rank", "scale_by_std", "advantages", "overlong_cache"}
    assert agreed_settings(Sums()).keys() == language | advantages | bounds.keys()


@pytest.mark.usefixtures("no_grace")
def test_makers_of_a_recipe_refuse_a_trainer_with_other_settings(
    client: Client, namespace: str
) -> None:
    def recipe(**settings: Any) -> Based:
        return Based(namespace=namespace, steps=1, **settings)

    def write(*_: Any, **__: Any) -> None:
        """Drop it."""

    with RecipeTrainer(client, recipe(base=6, rate=0.5), write) as trainer:
        trainer.begin()
        with (
            recipe(worker="m", base=10).maker(client, write) as maker,
            pytest.raises(ConfigError, match="base is 6 there and 10 here"),
        ):
            maker.run()
        assert trainer._stream.stats().ledger.put == 0
        with recipe(worker="m", base=6, maker_steps=1, group_size=2).maker(client, write) as maker:
            maker.run()
        assert trainer._stream.stats().ledger.put == 2


@pytest.mark.usefixtures("no_grace")
def test_a_maker_with_a_reference_policy_names_the_settings(client: Client, namespace: str) -> None:
    """The trainer has none, since its beta is 0."""

    class Referring(Counting):
        beta: float = option(0.0, "price of the divergence")

        def reference(self, models: dict[str, nn.Module]) -> nn.Module | None:
            return models["actor"] if self.beta else None

    def run(recipe: Referring) -> None:
        with recipe.maker(client, lambda *_, **__: None) as maker:
            maker.run()

    recipe = Referring(namespace=namespace, worker="m", beta=0.5, weights_timeout=60.0)
    models = recipe.models()
    other = agreed_settings(Referring())
    place = (client, namespace, recipe.weights_name, [])
    Broadcast(*place, settings=other).push(models, fully=True)
    with pytest.raises(ConfigError, match=r"beta is 0\.0 there and 0\.5 here"):
        run(recipe)
    Broadcast(*place, settings=agreed_settings(recipe)).push(models, fully=True)
    hasty = Referring(namespace=namespace, worker="m", beta=0.5, weights_timeout=0.1)
    with pytest.raises(WeightTimeout, match=f"{recipe.task_name}-reference"):
        run(hasty)
