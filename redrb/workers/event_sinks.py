"""Where a worker's events go: JSON lines, TensorBoard, Weights & Biases."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from redrb.metrics.events import TensorBoardLog, WandbLog, Write, write_to_all
from redrb.recipe.recipe import Recipe
from redrb.workers.metrics_log import MetricsLog


@contextmanager
def open_sinks(recipe: Recipe, *, rank: int = 0) -> Iterator[Write]:
    """Open the sinks that a recipe's settings name; returns the function that writes to all.

    Ranks beside the first write nothing.

    Args:
        recipe: The recipe with its settings.
        rank: This process' rank among data-parallel trainers.

    Raises:
        ConfigError: A sink cannot be opened: a library is missing, or a file cannot be used.
    """
    with ExitStack() as scope:
        writes: list[Write] = []
        if rank == 0:
            log = MetricsLog(recipe.metrics, worker=recipe.worker)
            writes.append(scope.enter_context(log).write)
            if recipe.tensorboard:
                folder = Path(recipe.tensorboard) / recipe.worker
                writes.append(scope.enter_context(TensorBoardLog(folder)).write)
            if recipe.wandb:
                writes.append(_wandb(recipe, scope))
        yield write_to_all(writes)


def _wandb(recipe: Recipe, scope: ExitStack) -> Write:
    declared: Any = recipe
    settings = {
        item.name: getattr(recipe, item.name)
        for item in dataclasses.fields(declared)
        if item.name != "url"  # it may have a password
    }
    run = WandbLog(
        recipe.wandb,
        name=recipe.worker,
        group=f"{recipe.namespace}/{recipe.task_name}",
        config=settings,
    )
    return scope.enter_context(run).write
