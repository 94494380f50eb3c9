"""`redrb inspect`: shows groups of a task, or rows of a table: what they hold."""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Final

from redrb.cli.arguments import TASK, Commands, add_command, add_flag, add_group
from redrb.cli.output import check_reader, show, size, table
from redrb.cli.watching import add_watch
from redrb.errors import ConfigError, StoreUnavailable
from redrb.words import printable_lines

if TYPE_CHECKING:
    from rich.table import Table

    from redrb.connection import Client
    from redrb.watch.groups import Choice, Follower, Page
    from redrb.watch.groups.choice import Rank

_TEXT = (
    "show groups of a task, or rows of a table. They are read and not taken: consumers get them as "
    "before. One id, or --full, shows everything of a group: its tokens, rewards, advantages, "
    "log-probabilities, tags and extras; else there is a row for each. Without a choice these are "
    "the newest groups. Of a table they are the rows with these keys, or those that changed last."
)
_COUNT: Final = 10
_LOOK_S: Final = 10.0
"""Seconds that one look may take; groups that are ranked by reward are read in full."""

_RANKS: Final = ("best", "worst", "stalest")

_WAIT_S: Final = 1.0
_PER_S: Final = 20
_HEAD_EVERY: Final = 20
_WIDTHS: Final = (9, 9, 7, 9, 7, 5, 8, 14, 4)
"""Widths of the columns while arrivals are followed: they are printed as they come."""


def add_to(commands: Commands) -> None:
    """Add the command."""
    parser = add_command(commands, "inspect", _TEXT, _run, subject=TASK)
    text = "ids of groups; of a table, keys of rows"
    parser.add_argument("ids", nargs="*", metavar="ID", help=text)
    parser.add_argument(
        "--status",
        metavar="STATUS",
        help="groups that wait in this status, such as completed or aborted; leased; dead: the "
        "newest dead letters",
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
    add_flag(parser, "--full", "show everything of each group")
    parser.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="a Hugging Face folder or a tokenizer.json, to show text; its code is not run",
    )
    add_flag(
        parser,
        "--follow",
        "show groups as they arrive, until Ctrl-C or after --count; on a terminal at most "
        f"{_PER_S} a second. It goes on when Redis was away",
    )
    add_group(parser)
    add_watch(parser, look_s=_LOOK_S)


def _run(options: argparse.Namespace) -> int:
    from redrb.connection import connect
    from redrb.watch.state.tables import is_table

    with connect(options.url) as client:
        if is_table(client, options.task, options.namespace):
            return _show_rows(client, options)
        choice = _choice(options)
        from redrb.watch.groups import Browser, Follower, Tokenizer

        tokenizer = None if options.tokenizer is None else Tokenizer.open(options.tokenizer)
        full = options.full or len(choice.ids) == 1
        kind = Follower if options.follow else Browser
        browser = kind(
            client,
            options.task,
            namespace=options.namespace,
            group=options.group,
            tokenizer=tokenizer,
            timeout_s=_LOOK_S,
        )
        if isinstance(browser, Follower):
            return _follow(browser, options)
        page = browser.look(choice, full=full)
    _show(page, options, full=full)
    gone = [str(view.id) for view in page.groups if view.state == "gone"]
    if gone or not page.groups:
        print(_absent(options, gone), file=sys.stderr)
    return 2 if gone else 0


def _absent(options: argparse.Namespace, gone: Sequence[str]) -> str:
    """Return why groups are not there, and how to keep the next ones."""
    from redrb.watch.state.findings.wording import command_line

    def command(*words: str) -> str:
        return command_line(words, namespace=options.namespace, url=options.url or "")

    kept = f"`{command('redrb', 'export', options.task, 'FOLDER')}` writes what is stored."
    if gone:
        return (
            f"redrb: not stored in task {options.task!r}: {', '.join(gone)}. A group is deleted "
            f"when it was acknowledged or removed; "
            f"`{command('redrb', 'inspect', options.task)}` shows the newest ones, and {kept}"
        )
    none = f"redrb: task {options.task!r} has no such groups."
    trained = options.status is None and options.where is None
    return f"{none} Trained ones are deleted; {kept}" if trained else none


def _show_rows(client: Client, options: argparse.Namespace) -> int:
    for name in (*_RANKS, "status", "where", "looks", "tokenizer", "follow"):
        if getattr(options, name) not in (None, False):
            raise ConfigError(
                f"--{name} is for groups of a task, and {options.task!r} is a table: give keys of "
                "rows, --count or --full."
            )
    from redrb.watch.rows import read_rows

    count = _COUNT if options.count is None else options.count
    rows = read_rows(
        client, options.task, options.namespace, tuple(dict.fromkeys(options.ids)), count
    )
    found = {row.key: row for row in rows}
    missing = [key for key in options.ids if key not in found]
    lines: list[str | Table] = []
    if options.full or len(options.ids) == 1:
        for row in rows:
            lines += [f"{row.key}: row {row.number:,}"]
            lines += (f"  tag {name}: {value!r}" for name, value in row.tags.items())
            lines += (f"  column {one.name}: {one}, {size(one.nbytes)}" for one in row.columns)
    elif rows:
        cells = [
            (
                row.key,
                f"{row.number:,}",
                size(sum(one.nbytes for one in row.columns)),
                ", ".join(f"{one.name} {one}" for one in row.columns),
                ", ".join(f"{name}={value!r}" for name, value in row.tags.items()),
            )
            for row in rows
        ]
        head = ("key", "row", "size", "columns", "tags")
        lines = [table(head, cells, left=("key", "columns", "tags"))]
    show({"table": options.task, "rows": list(map(asdict, rows))}, lines, as_json=options.json)
    if missing or not rows:
        which = f" with keys {', '.join(missing[:5])}" if missing else ""
        print(f"redrb: table {options.task!r} has no rows{which}.", file=sys.stderr)
    return 2 if missing else 0


def _follow(follower: Follower, options: argparse.Namespace) -> int:
    paced = sys.stdout.isatty() and not options.json
    never = threading.Event()
    shown, away = 0, ""
    while options.count is None or shown < options.count:
        check_reader()
        try:
            page = follower.next(_WAIT_S, full=options.full)
        except StoreUnavailable as error:
            if str(error) != away:
                print(f"redrb: {printable_lines(str(error))}", file=sys.stderr, flush=True)
            away = str(error)
            continue
        away = ""
        if options.count is not None:
            page = replace(page, groups=page.groups[: options.count - shown])
        if page.groups or page.notes:
            _show(page, options, full=options.full, after=shown)
        shown += len(page.groups)
        if paced:
            never.wait(len(page.groups) / _PER_S)
    return 0


def _choice(options: argparse.Namespace) -> Choice:
    from redrb.watch.groups.choice import Choice

    rank: Rank | None = next((each for each in _RANKS if getattr(options, each) is not None), None)
    count = getattr(options, rank or "count")
    where = None if options.where is None else _query(options.where)
    odd = [text for text in options.ids if not text.isdecimal()]
    if odd:
        raise ConfigError(f"{odd[0]!r} is no id of a group: ids are numbers.")
    choice = Choice(
        ids=tuple(dict.fromkeys(map(int, options.ids))),
        status=options.status,
        where=where,
        rank=rank,
        count=_COUNT if count is None else count,
        looks=options.looks,
    )
    choice.check()
    if options.follow and (replace(choice, count=_COUNT) != Choice() or options.watch):
        raise ConfigError(
            "--follow shows all groups as they arrive: leave ids, --status, --dead, --where, "
            "--looks, --watch, --best, --worst and --stalest out."
        )
    return choice


def _query(text: str) -> dict[str, Any]:
    try:
        query = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--where is not JSON: {error}.") from error
    if not isinstance(query, dict):
        raise ConfigError('--where is an object of tags, such as {"source": "math"}.')
    return query


def _show(page: Page, options: argparse.Namespace, *, full: bool, after: int | None = None) -> None:
    """Print a page; `after`: while arrivals are followed, the number of groups before it."""
    from redrb.cli.group_screen import COLUMNS, LEFT, everything, row
    from redrb.watch.groups import as_json

    if options.json:
        print(json.dumps(as_json(page), allow_nan=False), flush=True)
    elif full:
        for number, view in enumerate(page.groups):
            gap = [""] if number or after else []
            show(None, [*gap, *everything(view)], as_json=False)
    elif page.groups and after is None:
        show(None, [table(COLUMNS, map(row, page.groups), left=LEFT)], as_json=False)
    else:
        for number, view in enumerate(page.groups, start=after or 0):
            headed = number % _HEAD_EVERY == 0
            part = table(COLUMNS, [row(view)], left=LEFT, widths=_WIDTHS, headed=headed)
            show(None, [part], as_json=False)
    for note in page.notes:
        print(f"redrb: {note}.", file=sys.stderr, flush=True)
