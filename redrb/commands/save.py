"""`redrb save`: writes a task to a file."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from redrb.commands.arguments import TASK, Commands, add_command
from redrb.commands.output import figures, show


def add_to(commands: Commands) -> None:
    """Add the command."""
    parser = add_command(commands, "save", "write a task to a file", _run, subject=TASK)
    parser.add_argument(
        "path",
        metavar="PATH",
        type=Path,
        help="file, or directory of a task with partitions",
    )


def _run(options: argparse.Namespace) -> int:
    from redrb.connection import connect
    from redrb.stream.saving.partitions import save_partitions
    from redrb.stream.saving.saving import save_task
    from redrb.stream.task.inspection import existing_task

    with connect(options.url) as client:
        stores = existing_task(client, options.task, namespace=options.namespace)
        if len(stores) == 1:
            saved = asdict(save_task(stores[0], options.path))
        else:
            saved = asdict(save_partitions(stores, options.path))
    show(saved, figures(saved), as_json=options.json)
    return 0
