"""`redrb-maker`: makes a recipe's groups with the newest weights, and sends them to the task.

Any number of makers may run; one may start late, end or die at any time.
"""

from __future__ import annotations

import os
import socket
import sys
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from typing import NoReturn

from redrb.errors import ConfigError, RedrbError
from redrb.recipe.command_line import parse
from redrb.recipe.recipe import Recipe
from redrb.workers.ending import end, exit_status
from redrb.workers.event_sinks import open_sinks
from redrb.workers.trace_export import tracing_to_collector


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a maker until its steps are done or a signal comes; returns the exit status."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        recipe: Recipe = parse("redrb-maker", __doc__, words, worker=_new_name()).resolved.recipe
    except ConfigError as error:
        print(f"redrb-maker: {error}", file=sys.stderr)
        return 2
    try:
        _work(recipe)
    except RedrbError as error:
        print(f"redrb-maker {recipe.worker}: {error}", file=sys.stderr)
        return exit_status(error)
    return 0


def _work(recipe: Recipe) -> None:
    from redrb.runtime.stopping import leaving_on_signals

    with ExitStack() as scope:
        with leaving_on_signals():
            import torch

            import redrb
            from redrb.experience.faults import Fault, faults_reported

            torch.set_num_threads(recipe.threads)
            client = scope.enter_context(
                redrb.connect(recipe.url, min_replicas=recipe.min_replicas)
            )
            if recipe.tracing:
                scope.enter_context(
                    tracing_to_collector("redrb-maker", recipe.worker, rate=recipe.trace_rate)
                )
            write = scope.enter_context(open_sinks(recipe))
            write("start")

            def filtered(fault: Fault, groups: int) -> None:
                write("filtered", groups=groups, why=str(fault), kind=fault.kind)

            scope.enter_context(faults_reported(filtered))
            maker = recipe.maker(client, write)
            scope.enter_context(maker)
        maker.run()


def _new_name() -> str:
    """Return a unique name: containers repeat host names and process ids."""
    return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def run() -> NoReturn:
    """Run the command `redrb-maker`."""
    end(main())


if __name__ == "__main__":
    run()
