"""`redrb stats`: shows the counters, rates, staleness and workers of tasks and tables."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from redrb.cli.arguments import Commands, add_command, add_group
from redrb.cli.output import figures, show, size
from redrb.cli.watching import add_watch

if TYPE_CHECKING:
    from redrb.watch.state.model import TableState, TaskState

_TEXT = (
    "show the counters, staleness and workers of tasks, and the rows of tables. Waiting, leased "
    "and the other counters of groups are those of the consumer group. Rates need several looks: "
    "--watch shows those of the last ten seconds. `math@*` is the sum of the shards of one stream."
)


def add_to(commands: Commands) -> None:
    """Add the command."""
    several = "print one line of JSON for each task: it is as in `redrb top --json`"
    parser = add_command(commands, "stats", _TEXT, _run, subject=None, json_text=several)
    parser.add_argument(
        "task", metavar="TASK", nargs="+", help="name of the task, or table; also several"
    )
    add_group(parser)
    add_watch(parser)


def _run(options: argparse.Namespace) -> int:
    from redrb.connection import connect
    from redrb.errors import StoreDenied, StoreError
    from redrb.watch.state.rates import RateWindow
    from redrb.watch.state.reader import StateReader

    tasks = list(dict.fromkeys(options.task))
    window = vars(options).setdefault("window", RateWindow())  # `--watch` calls this repeatedly
    with connect(options.url) as client:
        reader = StateReader(
            client, options.namespace, tasks=tasks, group=options.group, window=window
        )
        state = reader.look()
    for task in state.tasks:
        if task.damage:
            raise StoreError(task.damage)
        if not task.readable:
            raise StoreDenied(
                f"the user of Redis at {state.where} may not read task {task.name!r}: "
                "`redrb acl --role observer` prints the permissions that it needs."
            )
    for table in state.tables:
        record = asdict(table) | {"balanced": table.balanced}
        show(record, figures(_figures_of_table(table)), as_json=options.json)
    shown = [  # of a sum not its shards, nor the sum of shards
        task
        for task in state.shown
        if task.name in tasks or not (task.shards or task in state.sums)
    ]
    for number, task in enumerate(shown, start=len(state.tables)):
        _print(task, options, first=not number)
    return 0


def _print(task: TaskState, options: argparse.Namespace, *, first: bool) -> None:
    if task.main is not None and not task.main.stats.joined:
        print(
            f"redrb: consumer group {options.group!r} has taken nothing yet; the ledger shows "
            "the groups that it would get.",
            file=sys.stderr,
        )
    if not (first or options.json):
        print()
    lines = iter(()) if options.json else _lines(task)
    show(asdict(task), lines, as_json=options.json)


def _lines(task: TaskState) -> Iterator[str]:
    from redrb.cli.top.tables import staleness_table, worker_table

    for name, value in _figures(task).items():
        yield f"{name:18} {value:>12,}" if type(value) is int else f"{name:18} {value!s:>12}"
    tables = [worker_table(task, task.name, None)]
    if task.main is not None:
        tables.insert(0, staleness_table(task.name, task.main.staleness, None))
    for table in tables:
        yield ""
        for line in table:
            yield line.plain.strip()


def _figures_of_table(table: TableState) -> dict[str, object]:
    counters = asdict(table)
    for name in ("name", "readable", "damage", "columns", "marks", "claims"):
        del counters[name]
    sizes = {name: size(counters.pop(name)) for name in ("bytes", "retained_bytes")}
    limits = {
        "limit": counters.pop("limit") or "none",
        "max_bytes": size(table.max_bytes) if counters.pop("max_bytes") else "none",
    }
    claims = {
        claim.name: f"waiting {_known(claim.waiting)}, leased {_known(claim.leased)}, "
        f"consumed {claim.consumed:,}; needs {', '.join(claim.columns)}"
        + (f" of {claim.size:,} rows together" if claim.size > 1 else "")
        for claim in table.claims
    }
    in_order = sorted(table.marks, key=table.marks.__getitem__)
    marks = {f"mark {name}": table.marks[name] for name in in_order}
    words = {"retain": table.retain or "none", "columns": ", ".join(table.columns) or "none"}
    return (
        {"table": table.name}
        | counters
        | sizes
        | limits
        | words
        | marks
        | claims
        | {"balanced": table.balanced}
    )


def _known(rows: int | None) -> str:
    return "-" if rows is None else f"{rows:,}"


def _figures(task: TaskState) -> dict[str, object]:
    if task.main is None:
        return {"task": task.name}
    from redrb.cli.top.text import rate

    stats = task.main.stats
    counters = asdict(stats)
    rates: dict[str, object] = {}
    if task.rates is not None:
        per_s = asdict(task.rates).items()
        rates = {f"{name}/s": rate(value) for name, value in per_s if name != "over_s"}
        rates["bytes_put/s"] = size(round(task.rates.bytes_put))
    pools = {f"waiting {status}": groups for status, groups in stats.waiting.items()}
    rights, parts = counters.pop("admission") or {}, counters.pop("parts") or {}
    sessions = counters.pop("sessions") or {}
    rights.pop("returns_s", None)
    makers = {f"held by {maker}": held for maker, held in rights.pop("makers", {}).items()}
    accounts = {"ledger": stats.ledger, "admission": stats.admission, "parts": stats.parts}
    checks = {f"{name}_balanced": one.balanced for name, one in accounts.items() if one is not None}
    elsewhere = ("ledger", "waiting")
    others = {key: value for key, value in counters.items() if key not in elsewhere}
    return (
        {"task": task.name, "order": task.order}
        | stats.ledger.as_dict()
        | pools
        | rates
        | others
        | checks
        | {"size": size(task.stored_bytes)}
        | ({} if task.memory_bytes is None else {"memory": size(task.memory_bytes)})
        | {f"rights {name}": value for name, value in rights.items()}
        | makers
        | {f"in parts: {name}": value for name, value in parts.items()}
        | {f"sessions {name}": value for name, value in sessions.items()}
    )
