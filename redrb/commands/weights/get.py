"""`redrb weights get`: writes a version into a file."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from redrb.commands.arguments import WEIGHTS, Commands, add_command
from redrb.commands.output import figures, rounded, show


def add_to(commands: Commands) -> None:
    """Add the command."""
    parser = add_command(commands, "get", "write a version into a file", _run, subject=WEIGHTS)
    parser.add_argument(
        "path",
        metavar="FILE",
        type=Path,
        help="safetensors file, of an adapter a folder as PEFT's; an older one is replaced",
    )
    parser.add_argument(
        "--version", type=int, help="number of a kept version (default: the newest)"
    )
    parser.add_argument("--base-model", help="of an adapter: name of the model that it belongs to")


def _run(options: argparse.Namespace) -> int:
    from redrb.connection import connect
    from redrb.weights.inspection.file_transfer import get_weights

    with connect(options.url) as client:
        got = get_weights(
            client,
            options.name,
            options.path,
            namespace=options.namespace,
            version=options.version,
            base_model=options.base_model,
        )
    show(asdict(got), figures(rounded(asdict(got))), as_json=options.json)
    return 0
