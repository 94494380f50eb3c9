"""`redrb weights ls`: lists all published weights of a namespace."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING

from redrb.commands.arguments import Commands, add_command
from redrb.commands.output import age, show, size, table
from redrb.commands.watching import add_watch

if TYPE_CHECKING:
    from redrb.weights.inspection.listing import PublishedWeights


def add_to(commands: Commands) -> None:
    """Add the command."""
    text = "list all published weights of a namespace"
    add_watch(add_command(commands, "ls", text, _run, subject=None))


def _run(options: argparse.Namespace) -> int:
    from redrb.connection import connect
    from redrb.weights.inspection.listing import published_in

    with connect(options.url) as client:
        found = published_in(client, options.namespace)
        if not found:
            where = f"namespace {options.namespace!r} at {client.where}"
            print(f"redrb: no weights are published in {where}.", file=sys.stderr)
    show(list(map(asdict, found)), _lines(found) if found else (), as_json=options.json)
    return 0


def _lines(found: Iterable[PublishedWeights]) -> list[str]:
    head = ("name", "version", "kind", "size", "age", "versions", "in redis")
    rows = [
        (
            weights.name,
            str(weights.newest.version),
            weights.newest.kind,
            size(weights.newest.nbytes),
            age(weights.newest.age_s),
            str(weights.versions),
            size(weights.stored_bytes),
        )
        for weights in found
    ]
    return table(head, rows, left=("name", "kind"))
