"""`redrb ls`: lists the tasks, tables and weights of a namespace."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

from redrb.cli.arguments import Commands, add_command, add_group
from redrb.cli.output import show, size, table
from redrb.cli.watching import add_watch

if TYPE_CHECKING:
    from rich.table import Table

    from redrb.stream.task.ledger import StreamStats
    from redrb.watch.state.model import State, TableState, TaskState, WeightsState

MOST_NAMES: Final = 10_000
"""Most tasks, and most weights, that are listed."""

_TASKS = "task order waiting leased dead stored limit size consumers version".split()


def add_to(commands: Commands) -> None:
    """Add the command."""
    text = (
        "list the tasks, tables and weights of a namespace. Waiting and leased are those of the "
        "consumer group. The limit is the most groups that may wait or be leased, and the most "
        "bytes. The size of a task is an estimate: its stored groups "
        "times the mean size of all groups ever put. The size of weights is that of the newest "
        "version; in use are those of live makers, kept is the number of versions, in redis the "
        "bytes of all. Below a table stand the tasks that claim its rows: rows that wait, that are "
        "leased, and that were consumed. `math@*` is the sum of the shards of one stream. What "
        "this user may not read is listed without figures."
    )
    parser = add_command(commands, "ls", text, _run, subject=None)
    add_group(parser)
    add_watch(parser)


def _run(options: argparse.Namespace) -> int:
    from redrb.connection import connect
    from redrb.registry import elsewhere
    from redrb.watch.state.reader import StateReader

    with connect(options.url) as client:
        state = StateReader(
            client, options.namespace, group=options.group, most_names=MOST_NAMES
        ).look()
        if not (state.tasks or state.tables or state.weights):
            where = f"namespace {options.namespace!r} at {client.where}"
            text = f"there are no tasks, tables and weights in {where}; {elsewhere(state.others)}."
            print(f"redrb: {text}", file=sys.stderr)
    note_damage("task", state.tasks)
    note_damage("table", state.tables)
    note_damage("weights", state.weights)
    if state.tasks_total > MOST_NAMES:
        print(f"redrb: {MOST_NAMES:,} of {state.tasks_total:,} tasks are listed.", file=sys.stderr)
    result = {
        "tasks": list(map(_record, state.tasks)),
        "tables": list(map(asdict, state.tables)),
        "weights": list(map(asdict, state.weights)),
    }
    show(result, _lines(state), as_json=options.json)
    return 0


def note_damage(kind: str, each_of: Iterable[TaskState | TableState | WeightsState]) -> None:
    """Say of which tasks, tables or weights the data cannot be read."""
    for each in each_of:
        if each.damage:
            print(f"redrb: {kind} {each.name} cannot be read: {each.damage}", file=sys.stderr)


def _record(task: TaskState) -> dict[str, object]:
    return {
        "name": task.name,
        "readable": task.readable,
        "damage": task.damage,
        "order": task.order,
        "stored_bytes": task.stored_bytes,
        "stats": None if task.main is None else asdict(task.main.stats),
    }


def _lines(state: State) -> Iterator[str | Table]:
    claims = {claim.name for each in state.tables for claim in each.claims}
    tasks = [task for task in state.shown if task.name not in claims]
    if tasks:
        yield table(_TASKS, map(_task_row, tasks), left=("task", "order"))
    if tasks and (state.tables or state.weights):
        yield ""
    if state.tables:
        from redrb.cli.top.tables import tables_table

        yield from (each.plain.rstrip()[2:] for each in tables_table(state, None))
    if state.tables and state.weights:
        yield ""
    yield from weight_lines(state)


def _task_row(task: TaskState) -> list[str]:
    if task.main is None:
        return [task.name, *["-"] * (len(_TASKS) - 1)]
    stats = task.main.stats
    counted = (stats.ledger.waiting, stats.ledger.leased, stats.dead_letters, stats.stored)
    figures = [*(f"{number:,}" for number in counted), _limits(stats)]
    newest = str(stats.version or "-")
    return [task.name, task.order, *figures, size(task.stored_bytes), f"{stats.consumers}", newest]


def _limits(stats: StreamStats) -> str:
    groups = [f"{stats.limit:,}"] if stats.limit else []
    return ", ".join(groups + ([size(stats.max_bytes)] if stats.max_bytes else [])) or "-"


def weight_lines(state: State) -> Iterator[str]:
    """Yield the lines of the table of published weights, which `redrb top` has, too."""
    from redrb.cli.top.tables import weights_table

    for line in weights_table(state, None) if state.weights else ():
        yield line.plain.strip()
