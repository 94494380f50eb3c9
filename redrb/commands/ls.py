"""`redrb ls`: lists the tasks and weights of a namespace."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from redrb.commands.arguments import Commands, add_command, add_group
from redrb.commands.output import age, show, size, table
from redrb.commands.watching import add_watch

if TYPE_CHECKING:
    from redrb.stream.task.listing import ListedTask
    from redrb.weights.inspection.listing import PublishedWeights

_TASKS = ("task", "order", "waiting", "leased", "dead", "stored", "size", "consumers", "version")
_WEIGHTS = ("weights", "version", "kind", "size", "age")


def add_to(commands: Commands) -> None:
    """Add the command."""
    text = (
        "list the tasks and weights of a namespace. Waiting and leased are those of the consumer "
        "group. The size of a task is an estimate: its stored groups times the mean size of all "
        "groups ever put. A task that this user may not read is listed without figures."
    )
    parser = add_command(commands, "ls", text, _run, subject=None)
    add_group(parser)
    add_watch(parser)


def _run(options: argparse.Namespace) -> int:
    from redrb.connection import connect
    from redrb.stream.task.listing import tasks_in
    from redrb.weights.inspection.listing import published_in

    with connect(options.url) as client:
        tasks = list(tasks_in(client, options.namespace, group=options.group))
        weights = published_in(client, options.namespace)
        if not (tasks or weights):
            where = f"namespace {options.namespace!r} at {client.where}"
            print(f"redrb: there are no tasks and weights in {where}.", file=sys.stderr)
    result = {"tasks": list(map(asdict, tasks)), "weights": list(map(asdict, weights))}
    show(result, _lines(tasks, weights), as_json=options.json)
    return 0


def _lines(tasks: Sequence[ListedTask], weights: Sequence[PublishedWeights]) -> Iterator[str]:
    if tasks:
        yield from table(_TASKS, map(_task_row, tasks), left=("task", "order"))
    if tasks and weights:
        yield ""
    if weights:
        yield from table(_WEIGHTS, map(_weights_row, weights), left=("weights", "kind"))


def _task_row(task: ListedTask) -> list[str]:
    stats = task.stats
    if stats is None:
        return [task.name, *["-"] * (len(_TASKS) - 1)]
    counted = (stats.ledger.waiting, stats.ledger.leased, stats.dead_letters, stats.stored)
    figures = [f"{number:,}" for number in counted]
    newest = str(stats.version or "-")
    return [task.name, task.order, *figures, size(task.stored_bytes), f"{stats.consumers}", newest]


def _weights_row(weights: PublishedWeights) -> list[str]:
    newest = weights.newest
    figures = (size(weights.stored_bytes), age(newest.age_s))
    return [weights.name, str(newest.version), newest.kind, *figures]
