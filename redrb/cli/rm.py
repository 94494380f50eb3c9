"""`redrb rm`: deletes a task or a table, after it has shown what that holds."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from redrb.cli.arguments import TASK, Commands, add_command, add_flag, add_yes, confirmed
from redrb.cli.output import figures, show
from redrb.errors import ConfigError

if TYPE_CHECKING:
    from redrb.connection import Client
    from redrb.watch.state.alive import TaskUse


def add_to(commands: Commands) -> None:
    """Add the command."""
    text = (
        "delete a task or a table. Of a task these are groups, leases, dead letters, history, "
        "ledger and settings; of a table its rows with their values on all nodes, and the tasks "
        "that claim them. It shows first what it holds and who works on it, and asks. It refuses "
        "while consumers or makers live, puts wait for room, or rows change."
    )
    parser = add_command(commands, "rm", text, _run, subject=TASK)
    add_yes(parser)
    add_flag(parser, "--force", "delete it although it is in use")


def _run(options: argparse.Namespace) -> int:
    from redrb.connection import connect
    from redrb.stream.task.removal import remove_task
    from redrb.watch.state.alive import task_use
    from redrb.watch.state.tables import is_table

    task, namespace = options.task, options.namespace
    if ":" in task:
        table, _, name = task.partition(":")
        raise ConfigError(f"task {name!r} claims rows of table {table!r}: it goes with the table.")
    with connect(options.url) as client:
        if is_table(client, task, namespace):
            return _remove_table(client, options)
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


def _remove_table(client: Client, options: argparse.Namespace) -> int:
    from redrb.watch.state.alive import table_use
    from redrb.watch.values import remove_table

    table, namespace = options.task, options.namespace
    use = table_use(client, table, namespace=namespace)
    shown = {"table": table, "rows": use.state.rows, "retained": use.state.retained}
    shown |= {"bytes": use.state.bytes + use.state.retained_bytes}
    if not options.json:
        claims = [f"task {each.contents.task} claims rows" for each in use.tasks]
        alive = [f"alive: {user}" for user in use.users]
        show(None, [*figures(shown), *claims, *alive], as_json=False)
    if not options.force:
        use.check(namespace)
    if not confirmed(f"Delete table {table!r} of namespace {namespace!r}?", yes=options.yes):
        print("redrb: nothing was deleted.", file=sys.stderr)
        return 1
    deleted = remove_table(client, table, namespace=namespace)
    result = {**shown, "users": use.users, "deleted": deleted}
    show(result, [f"deleted {table}"], as_json=options.json)
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
