"""`redrb weights diff`: shows what changed between two versions."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from redrb.commands.arguments import WEIGHTS, Commands, add_command
from redrb.commands.output import counted, percent, show, table

if TYPE_CHECKING:
    from redrb.weights.inspection.comparison import VersionDifference

_COLUMNS = (
    "Columns: elements of the tensor; changed, how many of them have other bits; share, these of "
    "all; largest, the largest change of one element; relative, that divided by the "
    "largest magnitude that an element of the tensor has in A ('-' where all are 0 in A); L2 norm, "
    "that of the tensor's change. Only tensors with a change are listed."
)


def add_to(commands: Commands) -> None:
    """Add the command."""
    text = f"show what changed between two versions that are kept. {_COLUMNS}"
    parser = add_command(commands, "diff", text, _run, subject=WEIGHTS)
    parser.add_argument("before", metavar="A", type=int, help="the earlier version")
    parser.add_argument(
        "after", metavar="B", type=int, nargs="?", help="the later one (default: the newest)"
    )


def _run(options: argparse.Namespace) -> int:
    from redrb.connection import connect
    from redrb.weights.inspection.comparison import compare_versions

    with connect(options.url) as client:
        found = compare_versions(
            client, options.name, options.before, options.after, namespace=options.namespace
        )
    changes = [{**asdict(change), "share": change.share} for change in found.changes]
    result = {**asdict(found), "changed": found.changed, "share": found.share, "changes": changes}
    show(result, _lines(found), as_json=options.json)
    return 0


def _lines(found: VersionDifference) -> Iterator[str]:
    yield (
        f"{found.name}, version {found.before} -> {found.after}: "
        f"{found.changed:,} of {counted(found.elements, 'element')} changed "
        f"({percent(found.changed, found.elements)}), in {counted(len(found.changes), 'tensor')}; "
        f"{counted(found.unchanged, 'tensor')} did not; L2 norm of the change {found.norm:.4g}"
    )
    if found.changes:
        yield ""
        yield from _table(found)
    odd = {change.name: change.not_finite for change in found.changes if change.not_finite}
    lists = {
        "infinite or NaN, and left out": [f"{name} ({count:,})" for name, count in odd.items()],
        f"only in version {found.before}": found.removed,
        f"only in version {found.after}": found.added,
        "of another shape or dtype": found.other,
    }
    for title, names in lists.items():
        if names:
            yield f"{title}: {', '.join(names)}"


def _table(found: VersionDifference) -> list[str]:
    head = ("tensor", "elements", "changed", "share", "largest", "relative", "L2 norm")
    rows = [
        (
            change.name,
            f"{change.elements:,}",
            f"{change.changed:,}",
            percent(change.changed, change.elements),
            f"{change.largest:.4g}",
            f"{change.largest_relative:.4g}" if change.largest_relative < math.inf else "-",
            f"{change.norm:.4g}",
        )
        for change in found.changes
    ]
    return table(head, rows, left=("tensor",))
