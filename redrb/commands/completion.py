"""`redrb completion`: prints a script with which a shell completes a program of redrb."""

from __future__ import annotations

import argparse
import io
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr
from itertools import islice
from pathlib import Path
from typing import Any, Final

from redrb.commands import run, settings
from redrb.commands.arguments import STATUS, Commands
from redrb.errors import ConfigError

SHELLS = ("bash", "zsh", "fish")

PROGRAMS = ("redrb", "redrb-maker", "redrb-trainer", "redrb-stage")

_TEXT = (
    "Print a script with which a shell completes commands, flags, choices, files, and the names of "
    "tasks and weights of the namespace that the line names, at REDRB_URL. For bash: `redrb "
    "completion bash > ~/.local/share/bash-completion/completions/redrb`; the same with a program "
    "after the shell, such as `redrb completion bash redrb-maker`, for redrb-maker, redrb-trainer "
    "and redrb-stage. `redrb completion tasks` and `redrb completion weights`, followed by the "
    "words of the line, print the names, which the scripts ask for."
)
_TASKS = frozenset({"task", "to", "from_", "task_name"})
_FILES = frozenset({"recipe", "settings", "out", "checkpoints", "prompts", "metrics"})

_OF_RECIPES = (["run"], ["settings"])
"""Commands of `redrb` that read the namespace from REDRB_NAMESPACE, as workers do."""

_ANSWER_S = 1.0
"""Seconds that Redis may take to answer, while a person waits for a completion."""

MOST_NAMES: Final = 1000


def add_to(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "completion",
        help="print a script for bash, zsh or fish, which completes a program of redrb",
        description=_TEXT,
        epilog=STATUS,
    )
    parser.add_argument(
        "subject", metavar="SHELL", choices=(*SHELLS, "tasks", "weights"), help=", ".join(SHELLS)
    )
    parser.add_argument(
        "words",
        metavar="WORD",
        nargs=argparse.REMAINDER,
        help="program that the script completes (default: redrb); after tasks or weights: words of "
        "the line that is completed, which may name a namespace",
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    if options.subject not in SHELLS:
        for name in names(options.subject, options.words):
            print(name)
        return 0
    program, *others = options.words or ["redrb"]
    if program not in PROGRAMS or others:
        raise ConfigError(f"name one program after the shell: {', '.join(PROGRAMS)}.")
    import shtab

    parser = _parser(program, options.parser)
    _mark(parser)
    with redirect_stderr(io.StringIO()):  # shtab notes what it leaves out
        preamble = _ZSH_NAMES if options.subject == "zsh" else ""
        print(shtab.complete(parser, shell=options.subject, preamble=preamble))
    return 0


_ZSH_NAMES = """\
_redrb_names() {
  compadd -- ${(f)"$(redrb completion $1 $service $words 2>/dev/null)"}
}"""
"""zsh itself would ask for names once, when it reads the file."""


def names(kind: str, words: Sequence[str] = ()) -> Iterator[str]:
    """Yield the names of "tasks" or "weights" of a namespace; none if Redis is away.

    `words` are the line that is completed, from the program on; it may name the namespace.

    A shell splits and expands them, so others than usual names are left out.
    """
    from redrb.connection import connect
    from redrb.connection.deadline import Deadline
    from redrb.errors import RedrbError
    from redrb.keys import is_name
    from redrb.registry import Registry

    try:
        with Deadline(at_most=_ANSWER_S), connect(retry_s=0, connect_timeout=_ANSWER_S) as client:
            registry = Registry(client, _namespace(words))
            found = islice(registry.names("task" if kind == "tasks" else "weights"), MOST_NAMES)
            yield from [name for name in found if is_name(name)]
    except RedrbError:  # a person completes a word: a message would be in the way
        return


def _namespace(words: Sequence[str]) -> str:
    """Return the namespace that a line names, or that its program has without the flag."""
    from redrb import environment
    from redrb.options import flag_of, variable_of

    flag = flag_of("namespace")
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(flag, nargs="?")
    line = " ".join(words).replace(f"{flag} = ", f"{flag}=")  # bash splits words there
    given: str | None = parser.parse_known_args(line.split())[0].namespace
    if given is None and words and (words[0] != "redrb" or words[1:2] in _OF_RECIPES):
        given = environment.variable(variable_of("namespace"))
    return given or "default"


def _asking(kind: str) -> dict[str, Any]:
    """Return how each shell asks for names, with the words of the line that is completed."""
    import shtab

    command = f"redrb completion {kind}"
    return {
        **shtab.cmd(f'{command} "${{COMP_WORDS[@]}}" 2>/dev/null'),
        "zsh": f"{{_redrb_names {kind}}}",
        "fish": f"({command} (commandline -opc) 2>/dev/null)",
    }


def _parser(program: str, whole: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Return the parser of a program; those of recipes have the flags of recipes in general."""
    if program == "redrb-stage":
        from redrb.workers import stage

        return stage.parser()
    if program != "redrb":
        from redrb.recipe.command_line import general_parser

        return general_parser(program, None)
    for action in whole._actions:  # noqa: SLF001  argparse lists them nowhere else
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            action.choices |= {"run": run.parser(), "settings": settings.parser()}
    return whole


def _mark(parser: argparse.ArgumentParser) -> None:
    """Say which arguments are names of tasks, of weights, or files."""
    import shtab

    for action in parser._actions:  # noqa: SLF001
        argument: Any = action
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            for each in action.choices.values():
                _mark(each)
        elif action.dest in _TASKS:
            argument.complete = _asking("tasks")
        elif action.dest == "weights" or action.metavar == "NAME":
            argument.complete = _asking("weights")
        elif action.type is Path or action.dest in _FILES:
            argument.complete = shtab.FILE
