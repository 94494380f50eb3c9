"""The options of a run, and its timing."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

NAMESPACE = "chaos"
WEIGHTS = "policy"
WORLD_SIZE = 2

LEASE_MS = 2_000
RETRY_S = 6.0
CONNECT_S = 2.0
PART_AGE_S = 5.0
"""Age at which a group is dropped if some of its parts are missing."""

LATE_S = 5.0
"""How far beyond its deadline a call may end."""


@dataclass(frozen=True)
class Options:
    """One run.

    Attributes:
        seconds: How long faults happen.
        seed: Of the choice of faults.
        server: Program of the server; empty: the first one of `tests.servers.programs`.
        interval: Mean time between two faults.
        without: Kinds of faults that are left out.
        keep: Keep the directory with journals and logs, also after a run without findings.
    """

    seconds: float
    seed: int
    server: str
    interval: float
    without: frozenset[str]
    keep: bool


@dataclass(frozen=True)
class Place:
    """What a worker must know of a run.

    Attributes:
        directory: Holds journals, logs and the files that ask workers to end.
        shared_memory: Holds the copies of weights that readers of one host share.
        url: The proxy before the primary.
        min_replicas: Replicas that must confirm a put.
    """

    directory: Path
    shared_memory: Path
    url: str
    min_replicas: int

    def ends(self, part: str) -> Path:
        """Return the file that asks the makers, or the others, to end."""
        return self.directory / f"end-{part}"


def parse(arguments: list[str], kinds: list[str]) -> Options:
    """Read the options of a run; `kinds` are the kinds of faults."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="time with faults (10)")
    parser.add_argument("--seconds", type=float, help="the same in seconds")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of faults (random)")
    parser.add_argument("--server", default="", help="program of the server (the one on PATH)")
    parser.add_argument("--interval", type=float, default=1.1, help="mean seconds between faults")
    parser.add_argument(
        "--without", default="", metavar="KIND,KIND", help=f"leave out kinds: {', '.join(kinds)}"
    )
    parser.add_argument("--keep", action="store_true", help="keep journals and logs")
    given = parser.parse_args(arguments)
    without = frozenset(filter(None, given.without.split(",")))
    if without - set(kinds):
        parser.error(f"unknown kinds: {', '.join(sorted(without - set(kinds)))}")
    return Options(
        seconds=given.minutes * 60 if given.seconds is None else given.seconds,
        seed=given.seed,
        server=given.server,
        interval=given.interval,
        without=without,
        keep=given.keep,
    )
