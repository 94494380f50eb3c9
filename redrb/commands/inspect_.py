"""`redrb inspect`: shows groups of a task: what they hold, and where they stand."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any, Final

from redrb.commands.arguments import TASK, Commands, add_command, add_group
from redrb.commands.watching import add_watch
from redrb.errors import ConfigError

if TYPE_CHECKING:
    from redrb.browse import Choice, Page
    from redrb.browse.choice import Rank

_TEXT = (
    "show groups of a task. They are read and not taken: consumers get them as before. One id, or "
    "--full, shows everything of a group: its tokens, rewards, advantages, log-probabilities, tags "
    "and extras; else there is a row for each. Without a choice these are the newest groups."
)
_COUNT: Final = 10
_LOOK_S: Final = 10.0
"""Seconds that one look may take; groups that are ranked by reward are read in full."""

_RANKS: Final = ("best", "worst", "stalest")


def add_to(commands: Commands) -> None:
    """Add the command."""
    parser = add_command(commands, "inspect", _TEXT, _run, subject=TASK)
    parser.add_argument("ids", type=int, nargs="*", metavar="ID", help="ids of groups")
    parser.add_argument(
        "--status",
        metavar="STATUS",
        help="groups that wait in this status, such as completed or aborted; leased; archived: "
        "also the acknowledged ones that are kept; dead: the newest dead letters",
    )
    parser.add_argument(
        "--dead", action="store_const", const="dead", dest="status", help="--status dead"
    )
    ranks = parser.add_mutually_exclusive_group()
    for rank, text in zip(
        _RANKS,
        ("highest mean reward", "lowest mean reward", "oldest policy version"),
        strict=True,
    ):
        ranks.add_argument(f"--{rank}", type=int, metavar="N", help=f"the N with the {text}")
    parser.add_argument(
        "--where",
        metavar="QUERY",
        help='groups whose declared tags match, as JSON: \'{"source": "math", "level_gt": 2}\'',
    )
    ranks.add_argument("--count", type=int, metavar="N", help="most groups (default: 10)")
    parser.add_argument(
        "--looks",
        type=int,
        metavar="N",
        help="groups to look at to find those that match (default: 10,000) or rank by reward "
        "(default: 200, most: 1,000)",
    )
    parser.add_argument("--full", action="store_true", help="show everything of each group")
    parser.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="a Hugging Face folder or a tokenizer.json, to show text; its code is not run",
    )
    add_group(parser)
    add_watch(parser, look_s=_LOOK_S)


def _run(options: argparse.Namespace) -> int:
    choice = _choice(options)
    from redrb.browse import Browser, Tokenizer, as_json
    from redrb.connection import connect

    tokenizer = None if options.tokenizer is None else Tokenizer.open(options.tokenizer)
    full = options.full or len(choice.ids) == 1
    with connect(options.url) as client:
        browser = Browser(
            client,
            options.task,
            namespace=options.namespace,
            group=options.group,
            tokenizer=tokenizer,
            timeout_s=_LOOK_S,
        )
        page = browser.look(choice, full=full)
    if options.json:
        print(json.dumps(as_json(page), allow_nan=False), flush=True)
    else:
        _print(page, full=full)
    for note in page.notes:
        print(f"redrb: {note}.", file=sys.stderr)
    gone = [str(view.id) for view in page.groups if view.state == "gone"]
    if gone:
        from redrb.state.findings.wording import command_line

        words = ("redrb", "inspect", options.task)
        newest = command_line(words, namespace=options.namespace, url=options.url or "")
        print(
            f"redrb: not stored in task {options.task!r}: {', '.join(gone)}. A group is deleted "
            f"when it was acknowledged or removed; `{newest}` shows the newest ones.",
            file=sys.stderr,
        )
        return 2
    if not page.groups:
        print(f"redrb: task {options.task!r} has no such groups.", file=sys.stderr)
    return 0


def _choice(options: argparse.Namespace) -> Choice:
    from redrb.browse.choice import Choice

    rank: Rank | None = next((each for each in _RANKS if getattr(options, each) is not None), None)
    count = getattr(options, rank or "count")
    where = None if options.where is None else _query(options.where)
    choice = Choice(
        ids=tuple(dict.fromkeys(options.ids)),
        status=options.status,
        where=where,
        rank=rank,
        count=_COUNT if count is None else count,
        looks=options.looks,
    )
    choice.check()
    return choice


def _query(text: str) -> dict[str, Any]:
    try:
        query = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--where is not JSON: {error}.") from error
    if not isinstance(query, dict):
        raise ConfigError('--where is an object of tags, such as {"source": "math"}.')
    return query


def _print(page: Page, *, full: bool) -> None:
    from redrb.commands.group_screen import COLUMNS, LEFT, everything, row
    from redrb.commands.output import print_lines, print_table

    if full:
        for number, view in enumerate(page.groups):
            print_lines(everything(view), gap=number > 0)
    elif page.groups:
        print_table(COLUMNS, map(row, page.groups), left=LEFT)
