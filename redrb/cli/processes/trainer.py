"""`redrb-trainer`: trains a recipe's models on full batches, publishes and evaluates them.

It starts from the newest checkpoint or published weights; the first trainer of a job makes them.
`torchrun --nproc-per-node 2 -m redrb.cli.processes.trainer RECIPE` trains on several ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, NoReturn

from redrb import environment
from redrb.cli.processes.lifetime import end, run_recipe, say_begun
from redrb.words import counted

if TYPE_CHECKING:
    from redrb.connection import Client
    from redrb.recipe.recipe import Recipe


def main(arguments: Sequence[str] | None = None) -> int:
    """Train until the target is reached or a signal comes; returns the exit status."""
    return run_recipe("redrb-trainer", __doc__, arguments, _begin, worker="trainer")


def _begin(recipe: Recipe, client: Client, scope: ExitStack) -> Callable[[], str]:
    """Make the trainer; its work returns why training ended, "" on all ranks but the first."""
    from redrb.cli.processes.event_sinks import open_sinks
    from redrb.recipe.trainer import RecipeTrainer
    from redrb.train.strategy import Strategy
    from redrb.train.world import rank_here

    if environment.variable("WORLD_SIZE", "1") != "1":  # torchrun describes a process group
        from torch import distributed

        device = Strategy(recipe.device or None).device
        distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
        scope.callback(distributed.destroy_process_group)
    write = scope.enter_context(open_sinks(recipe, rank=rank_here()))
    trainer = scope.enter_context(RecipeTrainer(client, recipe, write))
    trainer.begin()
    if rank_here() == 0:
        steps = counted(trainer.steps, "step")
        how = f", after {steps}, with weight version {trainer.weight_version}"
        say_begun("redrb-trainer", recipe, client, how)

    def work() -> str:
        trainer.work()
        reason = trainer.end()
        write("end", why=reason)
        return reason if rank_here() == 0 else ""

    return work


def run() -> NoReturn:
    """Run the command `redrb-trainer`."""
    end(main())


if __name__ == "__main__":
    run()
