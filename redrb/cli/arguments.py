"""Arguments that commands share, and the question before something is deleted."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Literal, TypeAlias, get_args

from redrb.errors import ConfigError
from redrb.options import Flags, UrlFlag, variable_of

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # noqa: SLF001

STATUS = (
    "Exit status: 0 when the command has done its work; 2 when an argument is wrong: an option, an "
    "unknown name, a file that is missing, of another kind or cannot be written; 1 when the work "
    "could not be done: Redis is away or full, the time is over, stored data is damaged."
)
"""The exit status of every command, for --help."""

TAKEOVER = (
    "A trainer that still publishes under this name is fenced: its next publish raises "
    "PublisherFenced."
)
"""The effect of `redrb weights put` and `rm` on a trainer that publishes under the same name."""

Role: TypeAlias = Literal[
    "maker", "episode-maker", "gateway", "trainer", "replay", "weight-reader", "observer", "admin"
]

ROLES: tuple[Role, ...] = get_args(Role)

TASK = ("task", "name of the task")
WEIGHTS = ("name", "name of the weights")


def add_command(
    commands: Commands,
    name: str,
    text: str,
    run: Callable[[argparse.Namespace], int],
    *,
    subject: tuple[str, str] | None,
    json_text: str = "print one line of JSON",
) -> argparse.ArgumentParser:
    """Add a command that looks at Redis, with the arguments that all of these have.

    `text` says what it does: its first sentence stands in the list of commands. `run` returns the
    exit status; `subject` is name and help of the first argument, such as `TASK`.
    """
    parser = commands.add_parser(
        name,
        help=text.partition(".")[0],
        description=text[0].upper() + text[1:],
        epilog=STATUS,
    )
    if subject is not None:
        parser.add_argument(subject[0], metavar=subject[0].upper(), help=subject[1])
    parser.add_argument("--namespace", default="default", help="its namespace (default: default)")
    parser.add_argument(
        "--url",
        action=UrlFlag,
        help=f"where Redis is; with a password only in {variable_of('url')}, the default",
    )
    add_json(parser, json_text)
    parser.set_defaults(run=run)
    return parser


def add_json(parser: argparse.ArgumentParser, text: str = "print one line of JSON") -> None:
    """Add the option that prints the result as JSON."""
    add_flag(parser, "--json", text)


def add_flag(parser: Flags, name: str, text: str) -> None:
    """Add an option without a value."""
    parser.add_argument(name, action="store_true", help=text)


def add_group(parser: argparse.ArgumentParser) -> None:
    """Add the option that names a consumer group."""
    parser.add_argument("--group", default="default", help="consumer group (default: default)")


def add_yes(parser: argparse.ArgumentParser) -> None:
    """Add the option that answers the question beforehand."""
    add_flag(parser, "--yes", "delete without asking")


def confirmed(question: str, *, yes: bool) -> bool:
    """Return whether to go on, or raise ConfigError."""
    if yes:
        return True
    if not sys.stdin.isatty():
        raise ConfigError("nothing is deleted: give --yes, or answer at a terminal.")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
