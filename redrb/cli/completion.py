"""`redrb completion`: prints a script with which a shell completes a program of redrb."""

from __future__ import annotations

import argparse
import io
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

from redrb.cli import settings
from redrb.cli.arguments import STATUS, Commands
from redrb.cli.run import command as run

PROGRAMS = ("redrb", "redrb-maker", "redrb-trainer", "redrb-stage")

_TEXT = (
    "Print a script with which a shell completes commands, flags, choices and files. For bash: "
    "`redrb completion bash > ~/.local/share/bash-completion/completions/redrb`; the same with a "
    "program after the shell, such as `redrb completion bash redrb-maker`, for redrb-maker, "
    "redrb-trainer and redrb-stage."
)
_FILES = frozenset({"recipe", "settings", "out", "checkpoints", "prompts", "metrics"})


def add_to(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "completion",
        help="print a script for bash, zsh or fish, which completes a program of redrb",
        description=_TEXT,
        epilog=STATUS,
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="shell of the script")
    parser.add_argument(
        "program",
        nargs="?",
        choices=PROGRAMS,
        default=PROGRAMS[0],
        help="program that the script completes (default: redrb)",
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    import shtab

    parser = _parser(options.program, options.parser)
    _mark_files(parser)
    with redirect_stderr(io.StringIO()):  # shtab notes what it leaves out
        print(shtab.complete(parser, shell=options.shell))
    return 0


def _parser(program: str, whole: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Return the parser of a program; those of recipes have the flags of recipes in general."""
    if program == "redrb-stage":
        from redrb.cli.processes import stage

        return stage.parser()
    if program != "redrb":
        from redrb.recipe.command_line import general_parser

        return general_parser(program, None)
    for action in whole._actions:  # noqa: SLF001  argparse lists them nowhere else
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            action.choices |= {"run": run.parser(), "settings": settings.parser()}
    return whole


def _mark_files(parser: argparse.ArgumentParser) -> None:
    import shtab

    for action in parser._actions:  # noqa: SLF001
        argument: Any = action
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            for each in action.choices.values():
                _mark_files(each)
        elif action.type is Path or action.dest in _FILES:
            argument.complete = shtab.FILE
