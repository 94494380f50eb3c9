"""`redrb export`: writes a task's groups as JSON lines and safetensors."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from redrb.commands.arguments import TASK, Commands, add_command, add_group
from redrb.commands.output import figures, show


def add_to(commands: Commands) -> None:
    """Add the command."""
    text = "write a task's groups as JSON lines and safetensors"
    parser = add_command(commands, "export", text, _run, subject=TASK)
    parser.add_argument("path", metavar="PATH", type=Path, help="directory; a new one")
    add_group(parser)


def _run(options: argparse.Namespace) -> int:
    from redrb.connection import connect
    from redrb.stream.export import export_task

    task, path, namespace = options.task, options.path, options.namespace
    with connect(options.url) as client:
        exported = export_task(client, task, path, namespace=namespace, group=options.group)
    show(asdict(exported), figures(asdict(exported)), as_json=options.json)
    return 0
