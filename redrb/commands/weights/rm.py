"""`redrb weights rm`: deletes all versions of weights."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from redrb.commands.arguments import TAKEOVER, WEIGHTS, Commands, add_command
from redrb.commands.output import figures, show, size


def add_to(commands: Commands) -> None:
    """Add the command."""
    text = f"delete all versions of weights, without asking. {TAKEOVER}"
    add_command(commands, "rm", text, _run, subject=WEIGHTS)


def _run(options: argparse.Namespace) -> int:
    from redrb.connection import connect
    from redrb.weights.inspection.removal import remove_weights

    with connect(options.url) as client:
        removed = remove_weights(client, options.name, namespace=options.namespace)
    lines = figures(
        {
            "deleted": removed.name,
            "versions": ", ".join(map(str, removed.versions)) or "none",
            "in redis": size(removed.stored_bytes),
        }
    )
    show(asdict(removed), [*lines, TAKEOVER], as_json=options.json)
    return 0
