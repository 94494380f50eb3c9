"""A recipe's rollouts in a maker: failed ones cost their group, slow ones hold up no other one."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

import redrb
from redrb import BufferItem, Client
from redrb.errors import UnknownTask
from redrb.recipe import Recipe
from redrb.recipe.trainer import RecipeTrainer
from redrb.stream import StreamStats
from redrb.stream.task.lookup import task_stats

Events = list[tuple[str, dict[str, Any]]]


class Plain(Recipe):
    """Groups of two samples whose reward is the number of their prompt."""

    maker_steps = 1
    prompts_per_step = 4
    group_size = 2
    groups = 4
    shuffle = False
    device = "cpu"
    bad = 1

    def models(self) -> dict[str, nn.Module]:
        return {"actor": nn.Linear(1, 1)}

    def prompts(self) -> list[dict[str, Any]]:
        return [{"number": number} for number in range(4)]

    def optimizers(self, models: dict[str, nn.Module]) -> dict[str, Any]:
        return {}

    def step(self, models: Any, optimizers: Any, experience: Any) -> dict[str, Any]:
        return {}

    def rollout(self, models: Any, prompt: Any) -> Any:
        return self.samples(prompt["number"])

    def samples(self, number: float) -> list[BufferItem]:
        reward = torch.tensor(float(number))
        return [BufferItem(None, None, reward=reward) for _ in range(2)]


class Raises(Plain):
    def rollout(self, models: Any, prompt: Any) -> Any:
        if prompt["number"] == self.bad:
            raise ValueError("the environment crashed")
        return super().rollout(models, prompt)


class RaisesLater(Plain):
    async def rollout(self, models: Any, prompt: Any) -> Any:
        await asyncio.sleep(0)
        if prompt["number"] == self.bad:
            raise ValueError("the environment crashed")
        return self.samples(prompt["number"])


class Nothing(Plain):
    def rollout(self, models: Any, prompt: Any) -> Any:
        return [] if prompt["number"] == self.bad else super().rollout(models, prompt)


class NaN(Plain):
    def rollout(self, models: Any, prompt: Any) -> Any:
        return self.samples(float("nan") if prompt["number"] == self.bad else 1)


class AllRaise(Raises):
    def rollout(self, models: Any, prompt: Any) -> Any:
        raise ValueError("the environment crashed")


class Hangs(Plain):
    rollout_timeout = 0.3
    stop_timeout = 1.0
    cancelled = threading.Event()

    async def rollout(self, models: Any, prompt: Any) -> Any:
        if prompt["number"] == self.bad:
            try:
                await asyncio.sleep(1e6)
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
        return self.samples(prompt["number"])


class HangsForEver(Hangs):
    rollout_timeout = 1e6


class Gated(Plain):
    """Its rollouts after the first wait for the gate, each in the maker's thread."""

    gate = threading.Event()

    def rollout(self, models: Any, prompt: Any) -> Any:
        if prompt["number"]:
            self.gate.wait(20)
        else:
            time.sleep(0.15)
        return super().rollout(models, prompt)


@pytest.fixture
def client(namespace: str) -> Iterator[Client]:
    with redrb.connect(f"fake://{namespace}") as client:
        yield client


def run(client: Client, recipe: Recipe) -> Events:
    """Publish first weights, and run a maker; returns its events."""
    events: Events = []
    with RecipeTrainer(client, recipe, lambda *_, **__: None) as trainer:
        trainer.begin()
        with recipe.maker(client, lambda event, **all_: events.append((event, all_))) as maker:
            maker.run()
    return events


def kill_when_put(client: Client, recipe: Recipe, groups: int) -> float:
    """Send SIGTERM to this process when a maker has put so many; returns the time, in seconds."""
    deadline = time.monotonic() + 20
    put = 0
    while put < groups:
        assert time.monotonic() < deadline
        time.sleep(0.01)
        with suppress(UnknownTask):  # its maker has not begun
            put = stats_of(client, recipe).ledger.put
    os.kill(os.getpid(), signal.SIGTERM)
    return time.monotonic()


def stats_of(client: Client, recipe: Recipe) -> StreamStats:
    return task_stats(client, recipe.task_name, namespace=recipe.namespace, group="default")


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Raises, "the rollout of the prompt {'number': 1} raised ValueError: the environment"),
        (RaisesLater, "the rollout of the prompt {'number': 1} raised ValueError: the environment"),
        (Nothing, "the rollout of the prompt {'number': 1} raised RecordError: it returned []"),
        (NaN, ""),
        (Hangs, "the rollout of the prompt {'number': 1} raised TimeoutError"),
    ],
)
def test_a_failed_rollout_costs_only_its_group(
    client: Client, namespace: str, kind: type[Plain], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = kind(namespace=namespace, worker="m")
    events = run(client, recipe)
    stats = stats_of(client, recipe)
    assert (stats.ledger.put, stats.ledger.filtered, stats.ledger.waiting) == (4, 1, 3)
    assert (stats.admission.held, stats.admission.used) == (0, 3)
    assert why in caplog.text
    [(event, values)] = events
    assert (event, values["groups"]) == ("put", 4 if kind is NaN else 3)


def test_a_batch_whose_rollouts_all_fail_is_counted(client: Client, namespace: str) -> None:
    recipe = AllRaise(namespace=namespace, worker="m")
    [(_, values)] = run(client, recipe)
    assert (values["groups"], values["reward"]) == (0, None)
    assert stats_of(client, recipe).ledger.filtered == 4


def test_a_rollout_that_never_ends_is_cancelled_after_sigterm(
    client: Client, namespace: str
) -> None:
    recipe = HangsForEver(namespace=namespace, worker="m", maker_steps=0)
    HangsForEver.cancelled.clear()
    with ThreadPoolExecutor(1) as pool:
        killed = pool.submit(kill_when_put, client, recipe, 3)  # the others of its batch
        run(client, recipe)
    assert time.monotonic() - killed.result() < recipe.stop_timeout + 1
    assert HangsForEver.cancelled.wait(5)
    assert stats_of(client, recipe).ledger.waiting == 3


def test_a_group_is_sent_while_later_rollouts_run(client: Client, namespace: str) -> None:
    recipe = Gated(namespace=namespace, worker="m", max_staleness=-1)
    Gated.gate.clear()
    with (
        redrb.ExperienceStream(client, recipe.task_name, namespace=namespace) as stream,
        ThreadPoolExecutor(1) as pool,
    ):
        stream.join_group()
        made = pool.submit(run, client, recipe)
        try:
            with stream.take(1, timeout=10) as lease:
                assert {float(item.reward) for item in lease.items()} == {0.0}
        finally:
            Gated.gate.set()
        made.result(20)
        assert stream.stats().ledger.put == 4
