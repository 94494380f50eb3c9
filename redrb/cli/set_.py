"""`redrb set`: changes settings of a task, or prints them with who set them."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from redrb.cli.arguments import TASK, Commands, add_command
from redrb.cli.output import show, table

if TYPE_CHECKING:
    from rich.table import Table

    from redrb.stream.task.stored_settings import StoredSettings

_TEXT = (
    "change settings of a task, or print them. Processes that work on the task go by the new "
    "settings from their next call on. Without NAME=VALUE it prints the settings and who set them. "
    "A value is as in ExperienceStream(...); none removes a setting; tags are separated by "
    "commas."
)


def add_to(commands: Commands) -> None:
    """Add the command."""
    parser = add_command(commands, "set", _TEXT, _run, subject=TASK)
    parser.add_argument(
        "settings",
        metavar="NAME=VALUE",
        nargs="*",
        default=[],
        help="such as limit=32 or max_staleness=none",
    )


def _run(options: argparse.Namespace) -> int:
    from redrb.connection import connect
    from redrb.stream.task.configuring import changed_settings
    from redrb.stream.task.stored_settings import parse_settings

    changes = parse_settings(options.settings)
    with connect(options.url) as client:
        stored = changed_settings(client, options.task, options.namespace, changes)
    result = {
        "values": dict(stored.values),
        "implied": sorted(stored.implied),
        "changes": [asdict(change) for change in stored.changes],
    }
    show(result, [_table(stored)], as_json=options.json)
    return 0


def _table(stored: StoredSettings) -> Table:
    rows: list[list[str]] = []
    removed = {change.setting: "none" for change in stored.changes}
    for name, value in sorted((removed | dict(stored.values)).items()):
        change: Any = stored.last_change(name)
        when = f"{change.time:%Y-%m-%d %H:%M:%S} UTC" if change else ""
        who = f"{change.host}, process {change.pid}" if change else ""
        user = f", user {change.user}" if change and change.user else ""
        implied = " (implied by a run)" if name in stored.implied else ""
        before = change.old or "none" if change else ""
        rows.append([name, value + implied, before, when, who + user])
    heads = ["setting", "value", "before", "set at", "set by"]
    return table(heads, rows, left=heads)
