"""Where a worker's events go: JSON lines, TensorBoard, W&B."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from redrb.cli.processes.metrics_log import MetricsLog
from redrb.recipe.recipe import Recipe
from redrb.recipe.settings import settings_of
from redrb.watch.metrics.events import TensorBoardLog, WandbLog, Write, write_to_all


@contextmanager
def open_sinks(recipe: Recipe, *, rank: int = 0) -> Iterator[Write]:
    """Open the sinks that a recipe's settings name; returns the function that writes to all.

    Ranks beside the first write nothing.

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
                shown = {
                    name: getattr(recipe, name)
                    for name in settings_of(type(recipe))
                    if name != "url"  # it may have a password
                }
                group = f"{recipe.namespace}/{recipe.task_name}"
                run = WandbLog(recipe.wandb, name=recipe.worker, group=group, config=shown)
                writes.append(scope.enter_context(run).write)
        yield write_to_all(writes)
