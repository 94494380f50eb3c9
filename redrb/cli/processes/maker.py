"""`redrb-maker`: makes a recipe's groups with the newest weights, and sends them to the task.

Any number of makers may run; one may start late, end or die at any time.
"""

from __future__ import annotations

import os
import signal
import socket
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, NoReturn

from redrb.cli.processes.lifetime import end, run_recipe, say_begun
from redrb.words import counted

if TYPE_CHECKING:
    from redrb.connection import Client
    from redrb.recipe.recipe import Recipe


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a maker until its steps are done or a signal comes; returns the exit status."""
    # containers repeat host names and process ids
    name = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    return run_recipe("redrb-maker", __doc__, arguments, _begin, worker=name)


def _begin(recipe: Recipe, client: Client, scope: ExitStack) -> Callable[[], str]:
    """Make the maker; its work returns why it is over, "" after a signal.

    Its events count groups that are filtered.
    """
    from redrb.cli.processes.event_sinks import open_sinks
    from redrb.experience.faults import Fault, faults_reported

    write = scope.enter_context(open_sinks(recipe))
    write("start")

    def filtered(fault: Fault, groups: int) -> None:
        write("filtered", groups=groups, why=str(fault), kind=fault.kind)

    scope.enter_context(faults_reported(filtered))
    maker = recipe.maker(client, write)
    scope.enter_context(maker)
    say_begun("redrb-maker", recipe, client)

    def work() -> str:
        maker.run()
        if maker.stopped in signal.Signals.__members__:
            return ""
        return maker.stopped or f"{counted(recipe.maker_steps, 'step', 'are')} done (--maker-steps)"

    return work


def run() -> NoReturn:
    """Run the command `redrb-maker`."""
    end(main())


if __name__ == "__main__":
    run()
