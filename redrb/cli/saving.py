"""`redrb save`, `resume` and `export`: a task or table to a file and back, or to other tools."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from redrb.cli.arguments import TASK, Commands, add_command, add_group
from redrb.cli.output import figures, show


def add_to(commands: Commands) -> None:
    """Add the commands."""
    save = add_command(commands, "save", "write a task or a table to a file", _save, subject=TASK)
    save.add_argument(
        "path",
        metavar="PATH",
        type=Path,
        help="file, or directory of a task with partitions",
    )
    resume = add_command(
        commands, "resume", "fill a new task or table from a file", _resume, subject=TASK
    )
    resume.add_argument("path", metavar="PATH", type=Path, help="file or directory of `redrb save`")
    text = "write a task's groups as JSON lines and safetensors"
    export = add_command(commands, "export", text, _export, subject=TASK)
    export.add_argument("path", metavar="PATH", type=Path, help="directory; a new one")
    add_group(export)


def _save(options: argparse.Namespace) -> int:
    from redrb.connection import connect
    from redrb.stream.saving.saving import save
    from redrb.stream.task.lookup import existing_task
    from redrb.table.saving import save_table
    from redrb.watch.rows import is_table

    with connect(options.url) as client:
        if is_table(client, options.task, options.namespace):
            of_table = save_table(client, options.task, options.path, namespace=options.namespace)
            show(asdict(of_table), figures(asdict(of_table)), as_json=options.json)
            return 0
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
    from redrb.table.saving import is_saved_table, resume_table

    path = options.path
    if is_saved_table(path):
        with connect(options.url) as client:
            of_table = resume_table(client, options.task, path, namespace=options.namespace)
        show(asdict(of_table), figures(asdict(of_table)), as_json=options.json)
        return 0
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
