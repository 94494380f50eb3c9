"""`redrb tail`: shows the groups of a task as they arrive."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from redrb.commands.arguments import TASK, Commands, add_command
from redrb.commands.output import check_reader, printable_lines

if TYPE_CHECKING:
    from redrb.browse import Arrivals

_TEXT = (
    "show the groups of a task as they arrive. They are read and not taken: consumers get them as "
    "before. On a terminal at most 20 groups a second are shown; how many were put, skipped, or "
    "gone before they were read, is said each second. It goes on when Redis was away, and ends "
    "with Ctrl-C."
)
_EVERY_S = 1.0
_PER_S = 20.0
_HEAD_EVERY = 20


def add_to(commands: Commands) -> None:
    """Add the command."""
    text = "print one line of JSON for each group, and for each change of the counters"
    parser = add_command(commands, "tail", _TEXT, _run, subject=TASK, json_text=text)
    parser.add_argument("--count", type=int, metavar="N", help="end after N groups")


def _run(options: argparse.Namespace) -> int:
    from redrb.checks import checked_int_or_none

    most = checked_int_or_none("--count", options.count, 1)
    from redrb.browse import Follower
    from redrb.connection import connect

    paced = sys.stdout.isatty() and not options.json
    screen = _Lines(most, as_json=options.json)
    with (
        connect(options.url) as client,
        Follower(
            client,
            options.task,
            namespace=options.namespace,
            per_s=_PER_S if paced else None,
        ) as follower,
    ):
        while not screen.done:
            screen.show(follower.next(_EVERY_S))
            check_reader()
    return 0


class _Lines:
    """Prints groups, and between them how many were put and missed.

    Attributes:
        done: Whether as many groups were shown as asked for.
    """

    def __init__(self, most: int | None, *, as_json: bool) -> None:
        self._most = most
        self._as_json = as_json
        self._shown = 0
        self._said: tuple[int, str] = (0, "")

    @property
    def done(self) -> bool:
        return self._most is not None and self._shown >= self._most

    def show(self, arrivals: Arrivals) -> None:
        """Print what arrived."""
        if self._most is not None:
            groups = arrivals.groups[: self._most - self._shown]
            arrivals = replace(arrivals, groups=groups)
        if self._as_json:
            self._json(arrivals)
        else:
            self._rows(arrivals)
        self._shown += len(arrivals.groups)
        self._say(arrivals)

    def _json(self, arrivals: Arrivals) -> None:
        from redrb.browse import as_json

        for view in arrivals.groups:
            print(json.dumps({"group": as_json(view)}, allow_nan=False), flush=True)
        if arrivals.groups or (arrivals.missed, arrivals.away) != self._said or arrivals.anew:
            counters = as_json(replace(arrivals, groups=()))
            del counters["groups"]
            print(json.dumps({"counters": counters}, allow_nan=False), flush=True)

    def _rows(self, arrivals: Arrivals) -> None:
        from redrb.commands.arrival_rows import head, line

        for number, view in enumerate(arrivals.groups, start=self._shown):
            if number % _HEAD_EVERY == 0:
                head()
            line(view, arrivals.per_s)

    def _say(self, arrivals: Arrivals) -> None:
        """Say what was missed, and that Redis is away or back; once for each change."""
        missed, away = self._said
        if arrivals.away != away:
            said = arrivals.away or "Redis is back"
            print(f"redrb: {printable_lines(said).rstrip('.')}.", file=sys.stderr, flush=True)
        if arrivals.anew:
            print("redrb: the task was created anew: its ids begin anew.", file=sys.stderr)
        if arrivals.missed > missed:
            number = arrivals.missed - missed
            print(
                f"redrb: {number:,} groups were not shown: they came faster, or were gone before "
                f"they were read ({arrivals.missed:,} of {arrivals.put:,} in all).",
                file=sys.stderr,
                flush=True,
            )
        self._said = (max(arrivals.missed, missed), arrivals.away)
