"""`redrb weights watch`: prints a line for each new version."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING

from redrb.commands.arguments import WEIGHTS, Commands, add_command
from redrb.commands.output import percent, show, size
from redrb.errors import ConfigError

if TYPE_CHECKING:
    from redrb.weights import WeightVersion


def add_to(commands: Commands) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "watch",
        "print a line for each new version, until Ctrl-C",
        _run,
        subject=WEIGHTS,
        json_text="print a line of JSON for each",
    )
    parser.add_argument("--count", type=int, help="end after so many versions")
    parser.add_argument(
        "--timeout", type=float, help="seconds to wait for the next one (default: for ever)"
    )


def _run(options: argparse.Namespace) -> int:
    from redrb.connection import connect
    from redrb.weights.inspection.listing import catalogue_of, nothing_published
    from redrb.weights.inspection.watching import new_versions

    if options.count is not None and options.count < 1:
        raise ConfigError(f"--count is {options.count}: it must be at least 1.")
    with connect(options.url) as client, _ended_by_ctrl_c():
        newest = catalogue_of(client, options.name, options.namespace).newer_than(0)
        if newest is None:
            reason = nothing_published(client, options.name, options.namespace)
            print(f"redrb: {reason} Waiting.", file=sys.stderr, flush=True)
        versions = new_versions(
            client,
            options.name,
            newest.version if newest is not None else 0,
            namespace=options.namespace,
            timeout=options.timeout,
        )
        for version in islice(versions, options.count):
            show(asdict(version), [_line(version)], as_json=options.json)
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
