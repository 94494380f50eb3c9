"""`redrb rm`: deletes a task, after it has shown what the task holds."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from redrb.commands.arguments import TASK, Commands, add_command
from redrb.commands.confirming import add_yes, confirmed
from redrb.commands.output import counted, figures, show

if TYPE_CHECKING:
    from redrb.state.model import WorkerState
    from redrb.stream.task.removal import TaskContents


def add_to(commands: Commands) -> None:
    """Add the command."""
    text = (
        "delete a task: groups, leases, dead letters, history, ledger and settings. It shows first "
        "what the task holds and who works on it, and asks. It refuses while consumers or makers "
        "live, or puts wait for room."
    )
    parser = add_command(commands, "rm", text, _run, subject=TASK)
    add_yes(parser)
    parser.add_argument("--force", action="store_true", help="delete it although it is in use")


def _run(options: argparse.Namespace) -> int:
    from redrb.connection import connect
    from redrb.state.alive import check_unused, workers_alive
    from redrb.stream.task.removal import remove_task, task_contents

    task, namespace = options.task, options.namespace
    with connect(options.url) as client:
        contents = task_contents(client, task, namespace=namespace)
        alive = workers_alive(client, task, namespace=namespace)
        if not options.json:
            show(None, _lines(contents, alive), as_json=False)
        if not options.force:
            check_unused(client, task, namespace=namespace)
        if not confirmed(f"Delete task {task!r} of namespace {namespace!r}?", yes=options.yes):
            print("redrb: nothing was deleted.", file=sys.stderr)
            return 1
        stored = remove_task(client, task, namespace=namespace, force=options.force)
    result = {**asdict(contents), "workers": list(map(asdict, alive)), "deleted": stored}
    show(result, [f"deleted {task}"], as_json=options.json)
    return 0


def _lines(contents: TaskContents, alive: tuple[WorkerState, ...]) -> Iterator[str]:
    from redrb.state.alive import listed

    named = asdict(contents)
    del named["consumer_groups"]
    yield from figures({name.replace("_", " "): value for name, value in named.items()})
    for group in contents.consumer_groups:
        yield (
            f"consumer group {group.name}: {group.waiting:,} waiting, {group.leased:,} leased, "
            f"{counted(group.consumers, 'consumer')} alive"
        )
    for worker in alive:
        yield f"alive: {listed((worker,))}"
