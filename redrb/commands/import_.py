"""`redrb import`: puts the groups of `redrb export` into a task."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from redrb.commands.arguments import TASK, Commands, add_command
from redrb.commands.output import figures, show


def add_to(commands: Commands) -> None:
    """Add the command."""
    parser = add_command(commands, "import", "put exported groups into a task", _run, subject=TASK)
    parser.add_argument("path", metavar="PATH", type=Path, help="directory of `redrb export`")
    parser.add_argument(
        "--timeout", type=float, help="seconds to wait for room (default: for ever)"
    )


def _run(options: argparse.Namespace) -> int:
    from redrb.connection import connect
    from redrb.stream.exchange import import_task

    task, path, namespace = options.task, options.path, options.namespace
    with connect(options.url) as client:
        imported = import_task(client, task, path, namespace=namespace, timeout=options.timeout)
    show(asdict(imported), figures(asdict(imported)), as_json=options.json)
    return 0
