"""The commands `redrb weights ...`; what they do is in `redrb/weights/inspection`."""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redrb.commands.tables import STATUS, age, counted, figures, percent, size, table
from redrb.errors import ConfigError
from redrb.options import variable_of

if TYPE_CHECKING:
    from redrb.connection import Client
    from redrb.weights import WeightVersion
    from redrb.weights.inspection.comparison import Difference
    from redrb.weights.inspection.listing import KeptVersion, ListedTensor, PublishedWeights

Run = Callable[[argparse.Namespace], int]

_FENCES = (
    "A trainer that still publishes under this name is fenced: its next publish raises "
    "PublisherFenced."
)

_COLUMNS = (
    "Columns: elements of the tensor; changed, how many of them have other bits; share, these of "
    "all; largest, the largest change of one element; relative, that divided by the "
    "largest magnitude that an element of the tensor has in A ('-' where all are 0 in A); L2 norm, "
    "that of the tensor's change. Only tensors with a change are listed."
)


def add_weights(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `weights` and what it can do."""
    parser = commands.add_parser(
        "weights", help="look at published weights, get, put and delete them", epilog=STATUS
    )
    own = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add(own, "ls", "list all published weights of a namespace", _ls, named=False)
    show = _add(own, "show", "list the versions of weights, or the tensors of one", _show)
    show.add_argument("--version", type=int, help="list the tensors of this version")
    show.add_argument("--tensors", action="store_true", help="list those of the newest version")
    get = _add(own, "get", "write a version into a file", _get)
    get.add_argument(
        "path",
        metavar="FILE",
        type=Path,
        help="safetensors file, of an adapter a folder as PEFT's; an older one is replaced",
    )
    get.add_argument("--version", type=int, help="one that is kept (default: the newest)")
    get.add_argument("--base-model", help="of an adapter: name of the model that it belongs to")
    put = _add(own, "put", f"publish a file as the next version. {_FENCES}", _put)
    put.add_argument(
        "path",
        metavar="FILE",
        type=Path,
        help="safetensors file, or folder: Hugging Face's, or an adapter's of PEFT",
    )
    put.add_argument("--dtype", help="publish floating-point tensors as this, such as bfloat16")
    put.add_argument(
        "--keep", type=int, help="versions to keep; older ones go (default: all that are there)"
    )
    told = f"delete all versions of weights, without asking. {_FENCES}"
    _add(own, "rm", told, _rm)
    told = f"show what changed between two versions that are kept. {_COLUMNS}"
    diff = _add(own, "diff", told, _diff)
    diff.add_argument("before", metavar="A", type=int, help="the earlier version")
    diff.add_argument(
        "after", metavar="B", type=int, nargs="?", help="the later one (default: the newest)"
    )
    watch = _add(own, "watch", "print a line for each new version, until Ctrl-C", _watch)
    watch.add_argument("--count", type=int, help="end after so many versions")
    watch.add_argument(
        "--timeout", type=float, help="seconds to wait for the next one (default: for ever)"
    )


def _add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    told: str,
    run: Run,
    *,
    named: bool = True,
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name, help=told.partition(".")[0], description=told[0].upper() + told[1:], epilog=STATUS
    )
    if named:
        parser.add_argument("name", metavar="NAME", help="name of the weights")
    parser.add_argument("--namespace", default="default", help="its namespace (default: default)")
    parser.add_argument("--url", help=f"where Redis is (default: {variable_of('url')})")
    line = "a line of JSON for each" if name == "watch" else "one line of JSON"
    parser.add_argument("--json", action="store_true", help=f"print {line}")
    parser.set_defaults(run=run)
    return parser


def _ls(options: argparse.Namespace) -> int:
    from redrb.weights.inspection.listing import published_in

    with _connect(options) as client:
        found = published_in(client, options.namespace)
        if not found:
            where = f"namespace {options.namespace!r} at {client.where}"
            print(f"redrb: no weights are published in {where}.", file=sys.stderr)
    _say(options, list(map(asdict, found)), _names_table(found) if found else ())
    return 0


def _names_table(found: Iterable[PublishedWeights]) -> list[str]:
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


def _show(options: argparse.Namespace) -> int:
    from redrb.weights.inspection.listing import check_kept, tensors_of, versions_of

    where = (options.name, options.namespace)
    with _connect(options) as client:
        if options.version is None and not options.tensors:
            versions = versions_of(client, *where)
            told: Any = list(map(asdict, versions))
            _say(options, {"name": options.name, "versions": told}, _versions_table(versions))
            return 0
        version = check_kept(client, *where, options.version)
        version = version if options.version is None else options.version
        tensors = tensors_of(client, *where, version)
    told = {"name": options.name, "version": version, "tensors": list(map(asdict, tensors))}
    _say(options, told, _tensors_table(tensors))
    return 0


def _versions_table(versions: Iterable[KeptVersion]) -> list[str]:
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


def _tensors_table(tensors: Iterable[ListedTensor]) -> list[str]:
    head = ("tensor", "dtype", "shape", "bytes", "tied to", "shards")
    rows = [
        (
            listed.name,
            listed.dtype,
            str(list(listed.shape)),
            f"{listed.nbytes:,}",
            listed.tied_to or "-",
            str(listed.pieces),
        )
        for listed in tensors
    ]
    return table(head, rows, left=("tensor", "dtype", "shape", "tied to"))


def _get(options: argparse.Namespace) -> int:
    from redrb.weights.inspection.file_transfer import get_weights

    with _connect(options) as client:
        got = get_weights(
            client,
            options.name,
            options.path,
            namespace=options.namespace,
            version=options.version,
            base_model=options.base_model,
        )
    _say(options, asdict(got), figures(_rounded(asdict(got))))
    return 0


def _put(options: argparse.Namespace) -> int:
    from redrb.weights.inspection.file_transfer import put_weights

    with _connect(options) as client:
        put = put_weights(
            client,
            options.name,
            options.path,
            namespace=options.namespace,
            dtype=options.dtype,
            keep=options.keep,
        )
    if put.took_over:
        print(f"redrb: took over. {_FENCES}", file=sys.stderr)
    shown = {**_rounded(asdict(put)), "dropped": _listed(put.dropped)}
    if options.keep is None:
        del shown["dropped"]  # nothing can be
    _say(options, asdict(put), figures(shown))
    return 0


def _rm(options: argparse.Namespace) -> int:
    from redrb.weights.inspection.removal import remove_weights

    with _connect(options) as client:
        removed = remove_weights(client, options.name, namespace=options.namespace)
    shown = {"deleted": removed.name, "versions": _listed(removed.versions)}
    lines = figures({**shown, "in redis": size(removed.stored_bytes)})
    _say(options, asdict(removed), [*lines, _FENCES])
    return 0


def _listed(versions: Iterable[int]) -> str:
    return ", ".join(map(str, versions)) or "none"


def _diff(options: argparse.Namespace) -> int:
    from redrb.weights.inspection.comparison import compare_versions

    with _connect(options) as client:
        found = compare_versions(
            client, options.name, options.before, options.after, namespace=options.namespace
        )
    told = {**asdict(found), "changed": found.changed, "share": found.share}
    told["changes"] = [{**asdict(change), "share": change.share} for change in found.changes]
    _say(options, told, _changes(found))
    return 0


def _changes(found: Difference) -> Iterable[str]:
    yield (
        f"{found.name}, version {found.before} -> {found.after}: "
        f"{found.changed:,} of {counted(found.elements, 'element')} changed "
        f"({percent(found.changed, found.elements)}), in {counted(len(found.changes), 'tensor')}; "
        f"{counted(found.unchanged, 'tensor')} did not; L2 norm of the change {found.norm:.4g}"
    )
    if found.changes:
        yield ""
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
        yield from table(head, rows, left=("tensor",))
    odd = {change.name: change.not_finite for change in found.changes if change.not_finite}
    lists = {
        "infinite or NaN, and left out": [f"{name} ({count:,})" for name, count in odd.items()],
        f"only in version {found.before}": found.removed,
        f"only in version {found.after}": found.added,
        "of another shape or dtype": found.other,
    }
    for what, names in lists.items():
        if names:
            yield f"{what}: {', '.join(names)}"


def _watch(options: argparse.Namespace) -> int:
    from redrb.weights.inspection.listing import catalogue_of, nothing_published
    from redrb.weights.inspection.watching import new_versions

    if options.count is not None and options.count < 1:
        raise ConfigError(f"--count is {options.count}: it must be at least 1.")
    with _connect(options) as client, _ended_by_ctrl_c():
        newest = catalogue_of(client, options.name, options.namespace).newer_than(0)
        if newest is None:
            told = nothing_published(client, options.name, options.namespace)
            print(f"redrb: {told} Waiting.", file=sys.stderr, flush=True)
        versions = new_versions(
            client,
            options.name,
            newest.version if newest is not None else 0,
            namespace=options.namespace,
            timeout=options.timeout,
        )
        for version in islice(versions, options.count):
            _say(options, asdict(version), [_line(version)])
    return 0


@contextmanager
def _ended_by_ctrl_c() -> Iterator[None]:
    """End the process at Ctrl-C, wherever it is: nothing is held, and every line was flushed.

    A KeyboardInterrupt that comes while an object is finalized is lost.
    """
    before = signal.signal(signal.SIGINT, lambda *_: os._exit(0))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _line(version: WeightVersion) -> str:
    at = time.strftime("%H:%M:%S", time.localtime(version.created_s))
    delta, nbytes = version.delta_bytes, version.nbytes
    sent = "" if delta is None else f"  delta {size(delta)} ({percent(delta, nbytes)})"
    return f"{at}  version {version.version:<6} {version.kind:5} {size(nbytes):>9}{sent}"


def _connect(options: argparse.Namespace) -> Client:
    from redrb.connection import connect

    return connect(options.url)


def _say(options: argparse.Namespace, told: object, lines: Iterable[str]) -> None:
    for line in [json.dumps(_finite(told), default=str)] if options.json else lines:
        print(line, flush=True)


def _finite(told: object) -> object:
    """Return what JSON can hold: differences of float64 may be beyond it."""
    if isinstance(told, dict):
        return {key: _finite(value) for key, value in told.items()}
    if isinstance(told, list | tuple):
        return list(map(_finite, told))
    return None if isinstance(told, float) and not math.isfinite(told) else told


def _rounded(told: dict[str, object]) -> dict[str, object]:
    return {name: f"{v:.2f}" if isinstance(v, float) else v for name, v in told.items()}
