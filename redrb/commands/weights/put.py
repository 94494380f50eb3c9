"""`redrb weights put`: publishes a file as the next version."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

from redrb.commands.arguments import TAKEOVER, WEIGHTS, Commands, add_command
from redrb.commands.output import figures, rounded, show


def add_to(commands: Commands) -> None:
    """Add the command."""
    text = f"publish a file as the next version. {TAKEOVER}"
    parser = add_command(commands, "put", text, _run, subject=WEIGHTS)
    parser.add_argument(
        "path",
        metavar="FILE",
        type=Path,
        help="safetensors file, or folder: Hugging Face's, or an adapter's of PEFT",
    )
    parser.add_argument("--dtype", help="publish floating-point tensors as this, such as bfloat16")
    parser.add_argument(
        "--keep",
        type=int,
        help="versions to keep; older ones are deleted (default: all that are there)",
    )


def _run(options: argparse.Namespace) -> int:
    from redrb.connection import connect
    from redrb.weights.inspection.file_transfer import put_weights

    with connect(options.url) as client:
        put = put_weights(
            client,
            options.name,
            options.path,
            namespace=options.namespace,
            dtype=options.dtype,
            keep=options.keep,
        )
    if put.took_over:
        print(f"redrb: took over. {TAKEOVER}", file=sys.stderr)
    shown = rounded(asdict(put)) | {"dropped": ", ".join(map(str, put.dropped)) or "none"}
    if options.keep is None:
        del shown["dropped"]  # no version was
    show(asdict(put), figures(shown), as_json=options.json)
    return 0
