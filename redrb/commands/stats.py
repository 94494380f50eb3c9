"""`redrb stats`: shows a task's ledger, and the consumers and producers that wait."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from redrb.commands.arguments import TASK, Commands, add_command, add_group
from redrb.commands.output import show
from redrb.commands.watching import add_watch


def add_to(commands: Commands) -> None:
    """Add the command."""
    text = "show a task's ledger, and the consumers and producers that wait"
    parser = add_command(commands, "stats", text, _run, subject=TASK)
    add_group(parser)
    add_watch(parser)


def _run(options: argparse.Namespace) -> int:
    from redrb.connection import connect
    from redrb.stream.task.inspection import task_stats

    with connect(options.url) as client:
        stats = task_stats(client, options.task, namespace=options.namespace, group=options.group)
    if not stats.joined:
        print(
            f"redrb: consumer group {options.group!r} has taken nothing yet; the ledger shows "
            "the groups that it would get.",
            file=sys.stderr,
        )
    result = {**asdict(stats), "ledger_balanced": stats.ledger.balanced}
    if stats.admission is not None:
        result["admission_balanced"] = stats.admission.balanced
    if stats.parts is not None:
        result["parts_balanced"] = stats.parts.balanced
    show(result, _lines(result), as_json=options.json)
    return 0


def _lines(result: dict[str, Any]) -> Iterator[str]:
    pools = {f"waiting {status}": groups for status, groups in result["waiting"].items()}
    compound = ("ledger", "waiting", "admission", "parts")
    rest = {name: value for name, value in result.items() if name not in compound}
    rights = dict(result["admission"] or {})
    makers = {f"held by {maker}": held for maker, held in rights.pop("makers", {}).items()}
    rights = {f"rights {name}": value for name, value in rights.items()}
    parts = {f"in parts: {name}": value for name, value in (result["parts"] or {}).items()}
    for name, value in (result["ledger"] | pools | rest | rights | makers | parts).items():
        yield f"{name:18} {value:>12,}" if type(value) is int else f"{name:18} {value!s:>12}"
