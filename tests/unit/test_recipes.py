"""Each recipe of redrb and each starter trains for a few steps, in one process."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import redrb
from redrb.cli import __main__ as cli
from redrb.recipe.command_line import parse
from redrb.recipe.trainer import RecipeTrainer
from redrb.stream.task.lookup import task_stats

SMALL = {
    "arithmetic": ("--supervised-steps", "5", "--width", "16", "--prompts-per-step", "8"),
    "multiturn": ("--supervised-steps", "5", "--width", "16", "--group-size", "4"),
    "cartpole": ("--group-size", "32", "--episodes", "1"),
    "vision": ("--width", "8", "--group-size", "4", "--held-out-images", "8"),
}
"""Flags that make a recipe quicker."""


@pytest.fixture(autouse=True)
def random_state() -> Iterator[None]:
    """Trainers seed the global generators."""
    with torch.random.fork_rng(devices=[]):
        yield


@pytest.mark.parametrize("name", [*SMALL, "grpo", "plain", "ppo"])
def test_maker_and_trainer_train_together(namespace: str, tmp_path: Path, name: str) -> None:
    recipe = name
    if name not in SMALL:
        recipe = str(tmp_path / f"my_{name}.py")
        assert cli.main(["new", name, recipe]) == 0
    words = [recipe, "--task", "job", "--groups", "4", "--steps", "3", "--target-reward", "1e9"]
    words += [*SMALL.get(name, ()), "--device", "cpu"]
    events: list[dict[str, Any]] = []

    def write(event: str, **values: Any) -> None:
        events.append({"event": event, **values})

    of_trainer, of_maker = (
        parse(f"redrb-{role}", None, words, worker=role).recipe for role in ("trainer", "maker")
    )
    with redrb.connect(f"fake://{namespace}") as client, ThreadPoolExecutor(1) as pool:

        def make() -> None:
            with of_maker.maker(client, lambda *_, **__: None) as maker:
                maker.run()

        with RecipeTrainer(client, of_trainer, write) as trainer:
            trainer.begin()
            making = pool.submit(make)
            trainer.work()
            trainer.end()
        making.result(60)  # it learns that the job is over
        stats = task_stats(client, "job", namespace="default", group="default")
    steps = [event for event in events if event["event"] == "step"]
    assert [event["step"] for event in steps] == [1, 2, 3]
    assert all(event["samples"] > 4 for event in steps)
    assert [event for event in events if event["event"] == "evaluation"][-1]["step"] == 3
    assert stats.ledger.acked == 3 * 4
    assert stats.ledger.balanced
