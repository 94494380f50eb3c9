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
    save.add_argument("path", metavar="PATH", type=Path, help="file")
    resume = add_command(
        commands,
        "resume",
        "fill a new task or table from a file. To go on with a job, run the same command again, "
        "as docs/how-to/plain-processes.md says under Restart.",
        _resume,
        subject=TASK,
    )
    resume.add_argument("path", metavar="PATH", type=Path, help="file of `redrb save`")
    text = "write a task's groups as JSON lines and safetensors"
    export = add_command(commands, "export", text, _export, subject=TASK)
    export.add_argument("path", metavar="PATH", type=Path, help="directory; a new one")
    add_group(export)


def _save(options: argparse.Namespace) -> int:
    from redrb.connection import connect
    from redrb.stream.saving.saving import save
    from redrb.stream.task.lookup import existing_task
    from redrb.watch.state.tables import is_table

    task, path, namespace = options.task, options.path, options.namespace
    with connect(options.url) as client:
        if is_table(client, task, namespace):
            from redrb.table.saving import save_table

            saved = asdict(save_table(client, task, path, namespace=namespace))
        else:
            saved = asdict(save(existing_task(client, task, namespace=namespace), path))
    show(saved, figures(saved), as_json=options.json)
    return 0


def _resume(options: argparse.Namespace) -> int:
    from redrb.connection import connect
    from redrb.errors import RedrbError
    from redrb.registry import Registry
    from redrb.stream.saving.checking import first_kind
    from redrb.stream.saving.file import Kind
    from redrb.stream.saving.resuming import resume
    from redrb.stream.task.removal import forget_name
    from redrb.stream.task.store import TaskStore

    task, path, namespace = options.task, options.path, options.namespace
    of_table = not path.is_dir() and first_kind(path) in (Kind.ROWS, Kind.TABLE)
    with connect(options.url) as client:
        if of_table:
            from redrb.table.saving import resume_table

            resumed = asdict(resume_table(client, task, path, namespace=namespace))
        else:
            store = TaskStore.of(client, namespace, task)
            Registry(client, namespace).add("task", task)  # first: the process may die
            try:
                resumed = asdict(resume(store, path))
            except RedrbError:
                forget_name(client, namespace, store)
                raise
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
