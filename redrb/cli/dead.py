"""`redrb dead`: lists dead letters, requeues them, and deletes them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from redrb.cli.arguments import (
    STATUS,
    TASK,
    Commands,
    add_command,
    add_flag,
    add_group,
    add_yes,
    confirmed,
)
from redrb.cli.output import figures, show, table
from redrb.cli.watching import add_watch
from redrb.errors import ConfigError

if TYPE_CHECKING:
    from redrb.stream.task.dead_letters import DeadLetter
    from redrb.stream.task.store import TaskStore


def add_to(commands: Commands) -> None:
    """Add the command `dead` and its commands."""
    parser = commands.add_parser(
        "dead", help="list, requeue and delete the dead letters of a task", epilog=STATUS
    )
    parts = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    listing = add_command(parts, "ls", "list the newest dead letters", _ls, subject=TASK)
    listing.add_argument("--count", type=int, default=20, help="most letters (default: 20)")
    listing.add_argument("--group", help="consumer group that gave them up (default: any)")
    listing.add_argument("--reason", default="", metavar="TEXT", help="text in why it is dead")
    add_watch(listing)
    _add_change(parts, "requeue", "put dead letters again, and print their new ids", "requeued")
    add_yes(_add_change(parts, "drop", "delete dead letters for good", "dropped"))


def _add_change(parts: Commands, name: str, text: str, verb: str) -> argparse.ArgumentParser:
    parser = add_command(parts, name, text, partial(_change, verb=verb), subject=TASK)
    parser.add_argument("ids", type=int, nargs="*", metavar="ID", help="ids of their groups")
    add_flag(parser, "--all", "all of the consumer group")
    parser.add_argument(
        "--reason", metavar="TEXT", help="all of the consumer group with this text in why"
    )
    add_group(parser)
    return parser


def _ls(options: argparse.Namespace) -> int:
    from redrb.stream.task.dead_letters import find_letters

    with _store(options) as store:
        letters = find_letters(store, group=options.group, text=options.reason)
        found = list(islice(letters, max(options.count, 0)))
    if not found and not options.json:
        print(f"redrb: {_none(options)}", file=sys.stderr)
    head = ("id", "group", "time", "failed", "consumer", "why")
    rows = [
        (
            str(letter.id),
            letter.group,
            f"{letter.time:%Y-%m-%d %H:%M:%S}",
            str(letter.failed_deliveries),
            letter.consumer,
            _why(letter),
        )
        for letter in found
    ]
    lines = [table(head, rows, left=("group", "time", "consumer", "why"))] if rows else ()
    records = [asdict(letter) | {"time": letter.time.isoformat()} for letter in found]
    for record in records:
        del record["items"]  # they were not read
    show(records, lines, as_json=options.json)
    return 0


def _change(options: argparse.Namespace, verb: str) -> int:
    if sum(map(bool, (options.ids, options.all, options.reason))) != 1:
        raise ConfigError("give ids, --all or --reason TEXT, and only one of them.")

    from redrb.stream.arguments import checked_ids, checked_letters
    from redrb.stream.task.dead_letters import drop_letters, find_letters, requeue
    from redrb.words import counted

    with _store(options) as store:
        text, drops = options.reason or "", verb == "dropped"
        given = checked_ids(options.ids, 0) if drops else checked_letters(options.ids)
        matching = find_letters(
            store, group=options.group, text=text, ids=given, unput=drops and not text
        )
        known = [letter.id for letter in matching]
        ids = list(dict.fromkeys(given)) or known
        if not ids:
            print(f"redrb: {_none(options)}", file=sys.stderr)
        elif drops and not options.ids:
            number = counted(len(ids), "dead letter")
            if not confirmed(f"Delete {number} of task {options.task!r}?", yes=options.yes):
                print("redrb: nothing was deleted.", file=sys.stderr)
                return 1
        new = {} if drops else requeue(store, options.group, ids)
        changed = drop_letters(store, options.group, ids) if drops else len(new)
    lines: list[Any] = [*figures({verb: changed})]
    if new:
        lines.append(table(("id", "new id"), [map(str, pair) for pair in new.items()]))
    show({verb: changed} | ({} if drops else {"ids": new}), lines, as_json=options.json)
    if options.ids and (changed < len(ids) or not {*ids} <= {*known}):
        print(f"redrb: {_missing(options, known)}", file=sys.stderr)
        return 1
    return 0


def _none(options: argparse.Namespace) -> str:
    of_group = f" of consumer group {options.group!r}" if options.group else ""
    with_text = f" with {options.reason!r} in why" if options.reason else ""
    return f"task {options.task!r} has no dead letters{of_group}{with_text}."


def _missing(options: argparse.Namespace, known: Collection[int]) -> str:
    from redrb.watch.state.findings.wording import command_line

    missing = ", ".join(str(each) for each in sorted({*options.ids}.difference(known)))
    words = ("redrb", "dead", "ls", options.task)
    listing = command_line(words, namespace=options.namespace, url=options.url or "")
    return (
        f"consumer group {options.group!r} of task {options.task!r} has no dead letter "
        f"{missing or 'for some of the ids any more'}: `{listing}` lists them."
    )


@contextmanager
def _store(options: argparse.Namespace) -> Iterator[TaskStore]:
    from redrb.connection import connect
    from redrb.stream.task.lookup import existing_task

    with connect(options.url) as client:
        yield existing_task(client, options.task, namespace=options.namespace)


def _why(letter: DeadLetter) -> str:
    exception = ": ".join(filter(None, (letter.exception, letter.message)))
    return f"{letter.reason} ({exception})" if exception else letter.reason
