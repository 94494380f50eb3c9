"""`redrb resume`: fills a new task from a file of `redrb save`."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from redrb.commands.arguments import TASK, Commands, add_command
from redrb.commands.output import figures, show


def add_to(commands: Commands) -> None:
    """Add the command."""
    parser = add_command(commands, "resume", "fill a new task from a file", _run, subject=TASK)
    parser.add_argument("path", metavar="PATH", type=Path, help="file or directory of `redrb save`")


def _run(options: argparse.Namespace) -> int:
    from redrb.connection import connect
    from redrb.registry import Registry
    from redrb.stream.saving.partitions import read_index, resume_partitions
    from redrb.stream.saving.resuming import resume_task
    from redrb.stream.task.store import TaskStore

    with connect(options.url) as client:
        name, path = (options.namespace, options.task), options.path
        if path.is_dir():
            stores = TaskStore.of_partitions(client, *name, len(read_index(path)))
            resumed = asdict(resume_partitions(stores, path))
        else:
            resumed = asdict(resume_task(TaskStore.of(client, *name), path))
        Registry(client, options.namespace).add("task", options.task)
    show(resumed, figures(resumed), as_json=options.json)
    return 0
