"""A job that restarts with other flags: its task takes them over, and keeps what a user has set."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

from redrb import (
    Client,
    ConfigError,
    ExperienceStream,
    TaskMismatch,
    WeightPublisher,
    WeightSubscriber,
)
from redrb.cli.run.job import delete_namespace
from redrb.errors import PublisherFenced
from redrb.recipe import option
from redrb.recipe.task_settings import settings_of_maker, settings_of_trainer
from redrb.recipe.trainer import RecipeTrainer
from redrb.stream import TaskSettings
from redrb.train.checkpoint import Position
from tests.counting_recipe import Counting
from tests.samples import numbered

Worker = Callable[[Client, Counting], TaskSettings]


@pytest.fixture
def start(client: Client, namespace: str) -> Callable[..., ExperienceStream]:
    """Open the task as a worker of the recipe does, with these flags."""

    def open_as(worker: Worker, **flags: object) -> ExperienceStream:
        recipe = Counting(namespace=namespace, **flags)  # type: ignore[arg-type]
        settings = worker(client, recipe)
        return ExperienceStream(client, recipe.task_name, namespace=namespace, implied=settings)

    return open_as


def test_a_run_with_other_flags_goes_on_and_keeps_what_a_user_has_set(
    start: Callable[..., ExperienceStream], caplog: pytest.LogCaptureFixture
) -> None:
    with start(settings_of_maker, limit=64) as early, start(settings_of_trainer, limit=64):
        assert early.settings().values["limit"] == "64"
        with start(settings_of_trainer, limit=32, max_staleness=1) as again:
            values = again.settings().values
            assert (values["limit"], values["max_staleness"]) == ("32", "1")
        early.configure(max_staleness=4)
        assert not caplog.records
        for worker in (settings_of_trainer, settings_of_maker):  # as a supervisor restarts them
            with start(worker, limit=32, max_staleness=1) as restarted:
                values = restarted.settings().values
                assert (values["limit"], values["max_staleness"]) == ("32", "4")
    first, second = caplog.messages
    assert "has max_staleness=4, which stays" in first
    assert "redrb set counting max_staleness=1 --namespace" in first
    assert "has max_staleness=4, and this maker was given 1" in second


def test_a_maker_with_other_flags_changes_nothing_and_says_so(
    start: Callable[..., ExperienceStream], caplog: pytest.LogCaptureFixture
) -> None:
    with start(settings_of_trainer, limit=64) as stream, caplog.at_level(logging.WARNING):
        before = stream.settings()
        with start(settings_of_maker, max_staleness=8, order="stalest"):
            assert stream.settings() == before
    said = "\n".join(caplog.messages)
    for part in ("limit=64", "max_staleness=2", "order=admission"):
        assert f"has {part}" in said


def test_an_order_that_stored_groups_cannot_have_is_refused(
    start: Callable[..., ExperienceStream],
) -> None:
    with start(settings_of_trainer, max_staleness=-1) as stream:
        stream.put(numbered(1))
        with pytest.raises(TaskMismatch, match="order is 'fifo', not 'admission'"):
            start(settings_of_trainer)
        stream.take(1, timeout=0).ack()
        start(settings_of_trainer).close()
        assert stream.settings().values["order"] == "admission"


class Paced(Counting):
    """Counts with a learning rate that is a setting."""

    learning_rate: float = option(1.0, "of SGD")

    def optimizers(self, models: dict[str, nn.Module]) -> dict[str, Optimizer]:
        return {"actor": SGD(models["actor"].parameters(), lr=self.learning_rate, momentum=0.5)}


def test_a_learning_rate_that_was_changed_holds_after_a_resume(
    client: Client, namespace: str, tmp_path: Path
) -> None:
    found = []
    for rate in (1.0, 0.25):
        recipe = Paced(namespace=namespace, checkpoints=str(tmp_path), steps=0, learning_rate=rate)
        with RecipeTrainer(client, recipe, lambda *_, **__: None) as trainer:
            trainer.begin()
            found.append(trainer._optimizers["actor"].param_groups[0]["lr"])
            checkpoints = trainer._loop.checkpoints
            assert checkpoints is not None
            checkpoints.save(trainer.checkpointed(), Position(step=1), {})
    assert found == [1.0, 0.25]


class Referring(Counting):
    """Its makers need the first weights of the actor, as a reference policy."""

    def reference(self, models: dict[str, nn.Module]) -> nn.Module:
        return models["actor"]


def test_a_resume_into_an_emptied_redis_publishes_the_reference_policy_again(
    client: Client, namespace: str, tmp_path: Path
) -> None:
    recipe = Referring(namespace=namespace, checkpoints=str(tmp_path), steps=0)
    published = []
    for step in (1, 2):
        with RecipeTrainer(client, recipe, lambda *_, **__: None) as trainer:
            trainer.begin()
            weight: Any = trainer.plain_models["actor"].weight.data
            assert float(weight) == step - 1
            weight += 1.0
            checkpoints = trainer._loop.checkpoints
            assert checkpoints is not None
            checkpoints.save(trainer.checkpointed(), Position(step=step), {})
        subscriber = WeightSubscriber(client, recipe.reference_name, namespace=namespace)
        published.append(subscriber.fetch())
        delete_namespace(client, namespace)
    first, again = published
    assert first.keys() == again.keys() == {"weight", "bias"}
    assert first["weight"] == 0.0
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_steps_before_an_error_are_in_a_checkpoint_and_the_next_trainer_says_where_it_begins(
    client: Client, namespace: str, tmp_path: Path
) -> None:
    options = {"checkpoints": str(tmp_path), "checkpoint_every": 50, "max_staleness": -1}
    recipe = Counting(namespace=namespace, order="fifo", **options)  # type: ignore[arg-type]
    events: list[tuple[str, Any]] = []

    def write(event: str, **values: object) -> None:
        events.append((event, values.get("step")))
        if event == "step" and values["step"] == 3:
            trainer._stream.configure(limit=1)

    with RecipeTrainer(client, recipe, write) as trainer:
        trainer.begin()
        for number in range(12):
            trainer._stream.put(numbered(number))
        with pytest.raises(ConfigError, match="limit"):
            trainer.work()
        trainer._stream.configure(limit=None)
    trained = max(step for event, step in events if event == "step")
    assert trained >= 3
    events.clear()
    with RecipeTrainer(client, recipe, write) as trainer:
        trainer.begin()
        weight: Any = trainer.plain_models["actor"].weight.detach()
        assert float(weight) == trained
    assert events[:2] == [("start", trained), ("publish", trained)]


def test_a_trainer_whose_weights_another_one_took_over_writes_no_checkpoint(
    client: Client, namespace: str, tmp_path: Path
) -> None:
    options = {"checkpoints": str(tmp_path), "checkpoint_every": 50, "max_staleness": -1}
    recipe = Counting(namespace=namespace, order="fifo", **options)  # type: ignore[arg-type]

    def write(event: str, **values: object) -> None:
        if event == "step" and values["step"] == 2:
            other = WeightPublisher(client, recipe.weights_name, namespace=namespace)
            other.publish(trainer.plain_models["actor"])

    with RecipeTrainer(client, recipe, write) as trainer:
        trainer.begin()
        for number in range(12):
            trainer._stream.put(numbered(number))
        with pytest.raises(PublisherFenced):
            trainer.work()
        assert trainer._loop.checkpoints is not None
        assert trainer._loop.checkpoints.steps() == []
