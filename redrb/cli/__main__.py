"""The command `redrb`: assembles the commands of `redrb/cli` and runs one."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from redrb import __version__
from redrb.cli import (
    acl,
    completion,
    dashboard,
    dead,
    doctor,
    engine_weights,
    exporter,
    gateway,
    inspect_,
    ls,
    new,
    rm,
    saving,
    server,
    set_,
    settings,
    stats,
    top,
    weights,
)
from redrb.cli.arguments import STATUS
from redrb.cli.run import command as run
from redrb.cli.run import demo
from redrb.errors import ConfigError, RedrbError
from redrb.options import CommandParser, variable_of
from redrb.words import printable_lines

_COMMANDS = (
    demo,
    run,
    new,
    settings,
    server,
    acl,
    top,
    ls,
    stats,
    inspect_,
    doctor,
    dashboard,
    set_,
    dead,
    rm,
    saving,
    weights,
    engine_weights,
    gateway,
    exporter,
    completion,
)


_OF_RECIPES = {"run": run.main, "settings": settings.main}
"""Commands whose flags depend on the recipe that they name; they read their arguments."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status, which means the same for all: `STATUS`.

    The status is 130 after Ctrl-C, and 141 if the reader of its output has ended, such as `head`.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        if words and words[0] in _OF_RECIPES:
            return _OF_RECIPES[words[0]](words[1:])
        options = _parser().parse_args(words)
        status: int = options.run(options)
    except RedrbError as error:
        print(f"redrb: {printable_lines(str(error))}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # such as `redrb stats | head`
        sys.stdout = None  # nothing is left to be flushed
        return 141
    return status


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="redrb",
        description="A Redis-backed streaming experience store for reinforcement learning.",
        epilog=f"Where --url is not given, {variable_of('url')} is read. {STATUS}",
    )
    parser.add_argument(
        "--version", action=_Version, nargs=0, help="show the version, and which codec runs"
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in _COMMANDS:
        command.add_to(commands)
    parser.set_defaults(parser=parser)
    return parser


class _Version(argparse.Action):
    """Prints the version and the codec's kernel, which is imported for this only."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from redrb.codec.kernels import NAME

        print(f"redrb {__version__} (codec: {NAME})")
        parser.exit()


if __name__ == "__main__":
    sys.exit(main())
