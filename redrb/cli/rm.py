"""`redrb rm`: deletes a task, after it has shown what the task holds."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from redrb.cli.arguments import TASK, Commands, add_command, add_flag, add_yes, confirmed
from redrb.cli.output import figures, show

if TYPE_CHECKING:
    from redrb.watch.state.alive import TaskUse


def add_to(commands: Commands) -> None:
    """Add the command."""
    text = (
        "delete a task: groups, leases, dead letters, history, ledger and settings. It shows first "
        "what the task holds and who works on it, and asks. It refuses while consumers or makers "
        "live, or puts wait for room."
    )
    parser = add_command(commands, "rm", text, _run, subject=TASK)
    add_yes(parser)
    add_flag(parser, "--force", "delete it although it is in use")


def _run(options: argparse.Namespace) -> int:
    from redrb.connection import connect
    from redrb.stream.task.removal import remove_task
    from redrb.watch.state.alive import task_use

    task, namespace = options.task, options.namespace
    with connect(options.url) as client:
        use = task_use(client, task, namespace=namespace)
        if not options.json:
            show(None, _lines(use), as_json=False)
        if not options.force:
            use.check(namespace)
        if not confirmed(f"Delete task {task!r} of namespace {namespace!r}?", yes=options.yes):
            print("redrb: nothing was deleted.", file=sys.stderr)
            return 1
        stored = remove_task(client, task, namespace=namespace)
    result = {**asdict(use.contents), "workers": list(map(asdict, use.workers)), "deleted": stored}
    show(result, [f"deleted {task}"], as_json=options.json)
    return 0


def _lines(use: TaskUse) -> Iterator[str]:
    from redrb.watch.state.findings.wording import counted

    named = asdict(use.contents)
    del named["consumer_groups"]
    yield from figures({name.replace("_", " "): value for name, value in named.items()})
    for group in use.contents.consumer_groups:
        yield (
            f"consumer group {group.name}: {group.waiting:,} waiting, {group.leased:,} leased, "
            f"{counted(len(group.consumers), 'consumer')} alive"
        )
    for user in use.users:
        yield f"alive: {user}"
