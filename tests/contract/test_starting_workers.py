"""Workers announce themselves as soon as they start, with what they wait for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import msgpack
import pytest
from torch import nn

import redrb
from redrb import environment
from redrb.cli.processes.stage import main
from redrb.connection import Client
from redrb.errors import StoreUnavailable
from redrb.recipe.examples.arithmetic import Arithmetic
from redrb.recipe.examples.multiturn import Multiturn
from redrb.recipe.trainer import RecipeTrainer
from redrb.train.episodes import EpisodeMaker
from redrb.watch.state.model import WorkerState
from redrb.watch.state.observer import Observer
from redrb.weights.reading.missing import announced_wait
from tests.samples import numbered

MOST_S = 2.0
"""Longer than an announcement at once, and shorter than the time until the first heartbeat."""


@pytest.fixture
def client(namespace):
    with redrb.connect(f"fake://{namespace}") as client:
        yield client


def announced(
    client: Client,
    wanted: Callable[[WorkerState], bool] = lambda _: True,
    *,
    most_s: float = MOST_S,
) -> WorkerState:
    """Return a worker of the default namespace that is as wanted, once it is announced."""
    with Observer(client, "default", every_s=0.02) as observer:
        view, end = observer.newest(), time.monotonic() + most_s
        while time.monotonic() < end:
            view = observer.wait(view.number, 1.0)
            tasks = view.state.tasks if view.state else ()
            found = [one for task in tasks for one in task.workers if wanted(one)]
            if found:
                return found[0]
    raise AssertionError(f"no worker is announced: {view.state}")


@pytest.mark.parametrize("kind", [Arithmetic, Multiturn])
def test_a_maker_that_waits_for_its_first_weights(kind, client):
    recipe = kind(worker="maker-1", beta=0.1, weights_timeout=60, lease_ms=600)
    with (
        recipe.maker(client, lambda *_, **__: None) as maker,
        ThreadPoolExecutor(1) as threads,
    ):
        running = threads.submit(maker.run)
        try:
            found = announced(client, lambda worker: worker.waits_for == "weights", most_s=20)
        finally:
            maker.stop()
        assert (found.role, found.label) == ("maker", "maker-1")
        running.result(20)
    assert announced(client).life == "ended"


def subscriber(client: Client) -> None:
    redrb.WeightSubscriber(client, "toi").wait(timeout=20)


def standby(client: Client) -> None:
    with redrb.WeightSubscriber(client, "toi").standby(nn.Linear(1, 1)) as standby:
        standby.wait(timeout=20)


@pytest.mark.parametrize("wait", [subscriber, standby])
def test_an_own_loop_that_waits_for_its_first_weights(wait, client):
    with (
        redrb.ExperienceStream(client, "toy", weights="toy") as stream,
        ThreadPoolExecutor(1) as pool,
    ):
        waiting = pool.submit(wait, client)
        found = announced(client, lambda worker: worker.waits_for == "weights")
        assert (found.role, found.weights_name) == ("maker", "toy")
        redrb.WeightPublisher(client, "toi").publish(nn.Linear(1, 1))
        waiting.result(20)
        assert not stream.worker._waits


def test_a_loop_that_has_begun_or_ended_waits_for_no_first_weights(client):
    with redrb.ExperienceStream(client, "math") as made:
        made.put(numbered(1))
        closed = redrb.ExperienceStream(client, "math")
        closed.close()
        taken = redrb.ExperienceStream(client, "math")
        taken.take(1, timeout=5).ack()
        with announced_wait(client):
            assert not any(stream.worker._waits for stream in (made, closed, taken))


def test_a_trainer_of_a_recipe_that_makes_its_models(client):
    class Slow(Arithmetic):
        def model(self):
            assert announced(client).role == "trainer"
            return super().model()

    RecipeTrainer(client, Slow(worker="trainer"), lambda *_, **__: None).close()


def test_a_maker_and_a_trainer_that_load_their_models(client):
    def models():
        assert announced(client).label == "maker-1"
        return nn.Linear(1, 1), None, None, None

    options: dict[str, Any] = {"client": client, "max_new_tokens": 1, "name": "maker-1"}
    with redrb.ExperienceMakerHolder(["math"], lambda: None, models, **options):
        pass
    with Trainer([], client=client, name="math"):
        found = announced(client, lambda worker: worker.role == "trainer")
        assert (found.label, found.waits_for) == ("math", "")


class Trainer(redrb.DetachedTrainer):
    def training_step(self, experience: redrb.Experience) -> Mapping[str, Any]:
        raise NotImplementedError

    def _update_remote_makers(self, fully_update: bool = False, **config: Any) -> None:
        raise NotImplementedError


class StartingEngine:
    """An engine that starts as soon as its maker is announced."""

    def __init__(self, client: Client) -> None:
        self.client = client

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(announced, self.client)
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def abort(self) -> None:
        pass


async def episode(prompt: Any, engine: Any) -> redrb.BufferItem:
    raise NotImplementedError


def test_a_maker_whose_engine_starts(client):
    with redrb.ExperienceStream(client, "math") as stream:
        EpisodeMaker(stream, episode, StartingEngine(client)).run([])


class Scorer:
    """Loads its model until the stage is announced."""

    def __init__(self) -> None:
        with redrb.connect(environment.variable(environment.URL)) as client:
            assert announced(client).role == "stage"

    def __call__(self, group: object) -> object:
        raise NotImplementedError


def test_a_stage_whose_function_loads_a_model(client, monkeypatch):
    monkeypatch.setattr("redrb.train.stage.Stage.run", lambda _: None)
    monkeypatch.setenv("REDRB_URL", client.url)
    assert main([f"{__name__}:Scorer", "--from=rollouts", "--to=scored"]) == 0


def test_a_wait_that_could_not_be_announced_is_over(client, monkeypatch):
    def refuse():
        raise StoreUnavailable("away", where="there")

    with redrb.ExperienceStream(client, "math") as stream:
        worker = stream.worker
        worker.takes()  # so that its first announcement is sent at once
        monkeypatch.setattr(worker, "beat", refuse)
        with pytest.raises(StoreUnavailable), worker.waiting("weights"):
            pass
        assert msgpack.unpackb(worker.announcement()).get("waits_for", "") == ""
