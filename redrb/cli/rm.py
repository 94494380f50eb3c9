"""`redrb rm`: deletes a task or a table, after it has shown what that holds."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from redrb.cli.arguments import TASK, Commands, add_command, add_flag, add_yes, confirmed
from redrb.cli.output import figures, show

if TYPE_CHECKING:
    from redrb.watch.state.alive import TableUse, TaskUse


def add_to(commands: Commands) -> None:
    """Add the command."""
    text = (
        "delete a task or a table. Of a task these are groups, leases, dead letters, ledger "
        "and settings; of a table its rows with their values on all nodes, and the tasks "
        "that claim them; of one of these, TABLE:TASK, what it has claimed and consumed. It shows "
        "first what it holds and who works on it, and asks. It refuses while consumers or makers "
        "live, puts wait for room, or rows change."
    )
    parser = add_command(commands, "rm", text, _run, subject=TASK)
    add_yes(parser)
    add_flag(parser, "--force", "delete it although it is in use")


def _run(options: argparse.Namespace) -> int:
    from redrb.connection import connect
    from redrb.stream.task.removal import remove_task
    from redrb.watch.state.alive import table_use, task_use
    from redrb.watch.state.tables import is_table
    from redrb.watch.values import remove_claims, remove_table

    name, namespace = options.task, options.namespace
    with connect(options.url) as client:
        what, remove = "task", remove_claims if ":" in name else remove_task
        use: TaskUse | TableUse
        if is_table(client, name, namespace):
            what, remove = "table", remove_table
            use = table_use(client, name, namespace=namespace)
        else:
            use = task_use(client, name, namespace=namespace)
        if not options.json:
            show(None, _lines(use), as_json=False)
        if not options.force:
            use.check(namespace)
        if not confirmed(f"Delete {what} {name!r} of namespace {namespace!r}?", yes=options.yes):
            print("redrb: nothing was deleted.", file=sys.stderr)
            return 1
        deleted = remove(client, name, namespace=namespace)
    show({**_record(use), "deleted": deleted}, [f"deleted {name}"], as_json=options.json)
    return 0


def _record(use: TaskUse | TableUse) -> dict[str, object]:
    from redrb.watch.state.alive import TaskUse

    if isinstance(use, TaskUse):
        return {**asdict(use.contents), "workers": list(map(asdict, use.workers))}
    state = use.state
    nbytes = state.bytes + state.retained_bytes
    shown = {"table": state.name, "rows": state.rows, "retained": state.retained, "bytes": nbytes}
    return {**shown, "users": use.users}


def _lines(use: TaskUse | TableUse) -> Iterator[str]:
    from redrb.watch.state.alive import TableUse
    from redrb.words import counted

    others = ("consumer_groups", "workers", "users")
    shown = {name: value for name, value in _record(use).items() if name not in others}
    yield from figures({name.replace("_", " "): value for name, value in shown.items()})
    if isinstance(use, TableUse):
        yield from (f"task {each.contents.task} claims rows" for each in use.tasks)
    else:
        for group in use.contents.consumer_groups:
            yield (
                f"consumer group {group.name}: {group.waiting:,} waiting, {group.leased:,} leased, "
                f"{counted(len(group.consumers), 'consumer')} alive"
            )
    yield from (f"alive: {user}" for user in use.users)
