"""`redrb weights`: looks at published weights, gets, puts and deletes them.

`redrb/weights/inspection` does the work; these functions parse arguments and print results.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from redrb.cli.arguments import STATUS, TAKEOVER, WEIGHTS, Commands, add_command, add_flag
from redrb.cli.output import age, figures, percent, rounded, show, size, table
from redrb.cli.watching import add_watch

if TYPE_CHECKING:
    from rich.table import Table

    from redrb.weights.inspection.listing import KeptVersion
    from redrb.weights.wire.manifest import WeightVersion


def add_to(commands: Commands) -> None:
    """Add the command `weights` and its commands."""
    parser = commands.add_parser(
        "weights", help="look at published weights, get, put and delete them", epilog=STATUS
    )
    parts = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    text = "list all published weights of a namespace"
    add_watch(add_command(parts, "ls", text, _ls, subject=None))
    text = "list the versions of weights, or the tensors of one"
    shown = add_command(parts, "show", text, _show, subject=WEIGHTS)
    shown.add_argument("--version", type=int, help="list the tensors of this version")
    add_flag(shown, "--tensors", "list the tensors of the newest version")
    add_watch(shown)
    get = add_command(parts, "get", "write a version into a file", _get, subject=WEIGHTS)
    get.add_argument(
        "path",
        metavar="FILE",
        type=Path,
        help="safetensors file, of an adapter a folder as PEFT's; an older one is replaced",
    )
    get.add_argument("--version", type=int, help="number of a kept version (default: the newest)")
    get.add_argument("--base-model", help="of an adapter: name of the model that it belongs to")
    text = f"publish a file as the next version. {TAKEOVER}"
    put = add_command(parts, "put", text, _put, subject=WEIGHTS)
    put.add_argument(
        "path",
        metavar="FILE",
        type=Path,
        help="safetensors file, or folder: Hugging Face's, or an adapter's of PEFT",
    )
    put.add_argument("--dtype", help="publish floating-point tensors as this, such as bfloat16")
    put.add_argument(
        "--keep",
        type=int,
        help="versions to keep; older ones are deleted (default: all that are there)",
    )
    text = f"delete all versions of weights, without asking. {TAKEOVER}"
    add_command(parts, "rm", text, _rm, subject=WEIGHTS)


def _ls(options: argparse.Namespace) -> int:
    from redrb.cli.ls import MOST_NAMES, note_damage, weight_lines
    from redrb.connection import connect
    from redrb.registry import elsewhere
    from redrb.watch.state.reader import StateReader

    with connect(options.url) as client:
        state = StateReader(client, options.namespace, most_names=MOST_NAMES).look()
    if not state.weights:
        where = f"namespace {options.namespace!r} at {state.where}"
        print(
            f"redrb: no weights are published in {where}; {elsewhere(state.others)}.",
            file=sys.stderr,
        )
    note_damage("weights", state.weights)
    show(list(map(asdict, state.weights)), weight_lines(state), as_json=options.json)
    return 0


def _show(options: argparse.Namespace) -> int:
    from redrb.connection import connect
    from redrb.weights.inspection.listing import kept_version, tensors_of, versions_of

    where = (options.name, options.namespace)
    with connect(options.url) as client:
        if options.version is None and not options.tensors:
            versions = versions_of(client, *where)
            result = {"name": options.name, "versions": list(map(asdict, versions))}
            show(result, [_versions(versions)], as_json=options.json)
            return 0
        version = kept_version(client, *where, options.version).version
        tensors = tensors_of(client, *where, version)
    head = ("tensor", "dtype", "shape", "bytes", "tied to")
    rows = [
        (each.name, each.dtype, str(list(each.shape)), f"{each.nbytes:,}", each.alias or "-")
        for each in tensors
    ]
    listed = [
        {"name": t.name, "dtype": t.dtype, "shape": t.shape, "tied_to": t.alias, "nbytes": t.nbytes}
        for t in tensors
    ]
    result = {"name": options.name, "version": version, "tensors": listed}
    lines = [table(head, rows, left=("tensor", "dtype", "shape", "tied to"))]
    show(result, lines, as_json=options.json)
    return 0


def _versions(versions: Iterable[KeptVersion]) -> Table:
    head = ("version", "kind", "base", "size", "stored", "delta", "of size", "tensors", "age")
    rows = [
        (
            str(kept.version),
            kept.kind,
            str(kept.base or "-"),
            size(kept.nbytes),
            size(kept.stored_bytes),
            "-" if kept.delta_bytes is None else size(kept.delta_bytes),
            "-" if kept.delta_bytes is None else percent(kept.delta_bytes, kept.nbytes),
            str(kept.tensors),
            age(kept.age_s),
        )
        for kept in versions
    ]
    return table(head, rows, left=("kind",))


def _get(options: argparse.Namespace) -> int:
    from redrb.connection import connect
    from redrb.weights.inspection.file_transfer import get_weights

    began = time.monotonic()
    with connect(options.url) as client:
        got = get_weights(
            client,
            options.name,
            options.path,
            namespace=options.namespace,
            version=options.version,
            base_model=options.base_model,
        )
    result = {"path": options.path, **_described(got), "seconds": time.monotonic() - began}
    show(result, figures(rounded(result)), as_json=options.json)
    return 0


def _put(options: argparse.Namespace) -> int:
    from redrb.connection import connect
    from redrb.weights.inspection.file_transfer import put_weights

    began = time.monotonic()
    with connect(options.url) as client:
        put, dropped, took_over = put_weights(
            client,
            options.name,
            options.path,
            namespace=options.namespace,
            dtype=options.dtype,
            keep=options.keep,
        )
    result = {
        **_described(put),
        "dropped": dropped,
        "took_over": took_over,
        "seconds": time.monotonic() - began,
    }
    if took_over:
        print(f"redrb: took over. {TAKEOVER}", file=sys.stderr)
    shown = rounded(result) | {"dropped": ", ".join(map(str, dropped)) or "none"}
    if options.keep is None:
        del shown["dropped"]  # no version was
    show(result, figures(shown), as_json=options.json)
    return 0


def _described(version: WeightVersion) -> dict[str, object]:
    fields = ("name", "version", "kind", "tensors", "nbytes")
    return {name: getattr(version, name) for name in fields}


def _rm(options: argparse.Namespace) -> int:
    from redrb.connection import connect
    from redrb.weights.inspection.listing import remove_weights

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
