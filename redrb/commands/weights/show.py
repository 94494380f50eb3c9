"""`redrb weights show`: lists the versions of weights, or the tensors of one version."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING

from redrb.commands import output
from redrb.commands.arguments import WEIGHTS, Commands, add_command
from redrb.commands.output import age, percent, size, table
from redrb.commands.watching import add_watch

if TYPE_CHECKING:
    from redrb.weights.inspection.listing import KeptVersion
    from redrb.weights.wire.layout import TensorEntry


def add_to(commands: Commands) -> None:
    """Add the command."""
    text = "list the versions of weights, or the tensors of one"
    parser = add_command(commands, "show", text, _run, subject=WEIGHTS)
    parser.add_argument("--version", type=int, help="list the tensors of this version")
    parser.add_argument(
        "--tensors", action="store_true", help="list the tensors of the newest version"
    )
    add_watch(parser)


def _run(options: argparse.Namespace) -> int:
    from redrb.connection import connect
    from redrb.weights.inspection.listing import kept_version, tensors_of, versions_of

    where = (options.name, options.namespace)
    with connect(options.url) as client:
        if options.version is None and not options.tensors:
            versions = versions_of(client, *where)
            result = {"name": options.name, "versions": list(map(asdict, versions))}
            output.show(result, _versions(versions), as_json=options.json)
            return 0
        version = kept_version(client, *where, options.version).version
        tensors = tensors_of(client, *where, version)
    listed = [
        {"name": t.name, "dtype": t.dtype, "shape": t.shape, "tied_to": t.alias, "nbytes": t.nbytes}
        for t in tensors
    ]
    result = {"name": options.name, "version": version, "tensors": listed}
    output.show(result, _tensors(tensors), as_json=options.json)
    return 0


def _versions(versions: Iterable[KeptVersion]) -> list[str]:
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


def _tensors(tensors: Iterable[TensorEntry]) -> list[str]:
    head = ("tensor", "dtype", "shape", "bytes", "tied to")
    rows = [
        (
            listed.name,
            listed.dtype,
            str(list(listed.shape)),
            f"{listed.nbytes:,}",
            listed.alias or "-",
        )
        for listed in tensors
    ]
    return table(head, rows, left=("tensor", "dtype", "shape", "tied to"))
