"""`redrb save`, `resume` and `export`: a task to a file and back, or to files for other tools."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from redrb.cli.arguments import TASK, Commands, add_command, add_group
from redrb.cli.output import figures, show


def add_to(commands: Commands) -> None:
    """Add the commands."""
    save = add_command(commands, "save", "write a task to a file", _save, subject=TASK)
    save.add_argument(
        "path",
        metavar="PATH",
        type=Path,
        help="file, or directory of a task with partitions",
    )
    resume = add_command(commands, "resume", "fill a new task from a file", _resume, subject=TASK)
    resume.add_argument("path", metavar="PATH", type=Path, help="file or directory of `redrb save`")
    text = "write a task's groups as JSON lines and safetensors"
    export = add_command(commands, "export", text, _export, subject=TASK)
    export.add_argument("path", metavar="PATH", type=Path, help="directory; a new one")
    add_group(export)


def _save(options: argparse.Namespace) -> int:
    from redrb.connection import connect
    from redrb.stream.saving.saving import save
    from redrb.stream.task.lookup import existing_task

    with connect(options.url) as client:
        stores = existing_task(client, options.task, namespace=options.namespace)
        saved = asdict(save(stores, options.path))
    show(saved, figures(saved), as_json=options.json)
    return 0


def _resume(options: argparse.Namespace) -> int:
    from redrb.connection import connect
    from redrb.registry import Registry
    from redrb.stream.saving.directory import read_index
    from redrb.stream.saving.resuming import resume
    from redrb.stream.task.store import TaskStore

    path = options.path
    # of several tasks `resume` says what to do
    partitions = max(map(len, read_index(path).values()), default=1) if path.is_dir() else 1
    with connect(options.url) as client:
        stores = TaskStore.of_partitions(client, options.namespace, options.task, partitions)
        resumed = asdict(resume(stores, path))
        Registry(client, options.namespace).add("task", options.task)
    show(resumed, figures(resumed), as_json=options.json)
    return 0


def _export(options: argparse.Namespace) -> int:
    from redrb.connection import connect
    from redrb.stream.export import export_task

    task, path, namespace = options.task, options.path, options.namespace
    with connect(options.url) as client:
        exported = export_task(client, task, path, namespace=namespace, group=options.group)
    show(asdict(exported), figures(asdict(exported)), as_json=options.json)
    return 0
