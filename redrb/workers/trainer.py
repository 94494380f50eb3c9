"""`redrb-trainer`: trains a recipe's models on full batches, publishes and evaluates them.

It starts from the newest checkpoint or published weights; the first trainer of a job makes them.
`torchrun --nproc-per-node 2 -m redrb.workers.trainer RECIPE` trains on several ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import NoReturn

from redrb import environment
from redrb.errors import ConfigError, RedrbError
from redrb.recipe.command_line import parse
from redrb.recipe.recipe import Recipe
from redrb.workers.ending import end, exit_status
from redrb.workers.event_sinks import open_sinks
from redrb.workers.trace_export import tracing_to_collector


def main(arguments: Sequence[str] | None = None) -> int:
    """Train until the target is reached or a signal comes; returns the exit status."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        recipe: Recipe = parse("redrb-trainer", __doc__, words, worker="trainer").resolved.recipe
    except ConfigError as error:
        print(f"redrb-trainer: {error}", file=sys.stderr)
        return 2
    try:
        reason = _work(recipe)
    except RedrbError as error:
        print(f"redrb-trainer {recipe.worker}: {error}", file=sys.stderr)
        return exit_status(error)
    if reason:
        print(f"redrb-trainer {recipe.worker} ends: {reason}", file=sys.stderr)
    return 0


def _work(recipe: Recipe) -> str:
    """Train, and return why training ended; "" on all ranks but the first."""
    from redrb.runtime.stopping import leaving_on_signals

    with ExitStack() as scope:
        with leaving_on_signals():
            import torch

            import redrb
            from redrb.recipe.trainer import RecipeTrainer
            from redrb.runtime.world import rank_here

            torch.set_num_threads(recipe.threads)
            _join_ranks(recipe, scope)
            client = scope.enter_context(
                redrb.connect(recipe.url, min_replicas=recipe.min_replicas)
            )
            if recipe.tracing:
                scope.enter_context(
                    tracing_to_collector("redrb-trainer", recipe.worker, rate=recipe.trace_rate)
                )
            write = scope.enter_context(open_sinks(recipe, rank=rank_here()))
            trainer = scope.enter_context(RecipeTrainer(client, recipe, write))
            trainer.begin()
        trainer.work()
        reason = trainer.end()
        write("end", why=reason)
        return reason if rank_here() == 0 else ""


def _join_ranks(recipe: Recipe, scope: ExitStack) -> None:
    """Join the process group that torchrun describes in the environment, if there is one."""
    if environment.variable("WORLD_SIZE", "1") == "1":
        return
    from torch import distributed

    from redrb.runtime.strategy import Strategy

    device = Strategy(recipe.device or None).device
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    scope.callback(distributed.destroy_process_group)


def run() -> NoReturn:
    """Run the command `redrb-trainer`."""
    end(main())


if __name__ == "__main__":
    run()
