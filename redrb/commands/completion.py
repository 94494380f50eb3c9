"""`redrb completion`: prints a script with which a shell completes the commands of redrb."""

from __future__ import annotations

import argparse
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr
from itertools import islice
from pathlib import Path
from typing import Any, Final

from redrb.commands import run, settings
from redrb.commands.arguments import STATUS, Commands
from redrb.errors import ConfigError

SHELLS = ("bash", "zsh", "fish")

_TEXT = (
    "Print a script with which a shell completes commands, flags, choices, files, and the names of "
    "tasks and weights of the namespace that the line names, at REDRB_URL; also those of "
    "redrb-maker, redrb-trainer and redrb-stage. For bash: `redrb completion bash > "
    "~/.local/share/bash-completion/completions/redrb`, with links redrb-maker, redrb-trainer and "
    "redrb-stage to this file; or `source <(redrb completion bash)`. `redrb completion tasks` and "
    "`redrb completion weights`, followed by the words of the line, print the names, which the "
    "scripts ask for."
)
_TASKS = frozenset({"task", "to", "from_", "task_name"})
_FILES = frozenset({"recipe", "settings", "out", "checkpoints", "prompts", "metrics"})

_OF_RECIPES = frozenset({"run", "settings"})
"""Commands of `redrb` that read the namespace from REDRB_NAMESPACE, as workers do."""

_ANSWER_S = 1.0
"""Seconds that Redis may take to answer, while a person waits for a completion."""

MOST_NAMES: Final = 1000


def add_to(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "completion",
        help="print a script for bash, zsh or fish, which completes commands",
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
        help="words of the line that is completed; it may name a namespace",
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    if options.subject not in SHELLS:
        for name in names(options.subject, options.words):
            print(name)
        return 0
    import shtab

    scripts = {}
    for parser in _parsers(options.parser):
        _mark(parser)
        with redirect_stderr(io.StringIO()):  # shtab notes what it leaves out
            scripts[parser.prog] = shtab.complete(parser, shell=options.subject)
    print(_zsh(scripts) if options.subject == "zsh" else "\n".join(scripts.values()))
    return 0


def _zsh(scripts: Mapping[str, str]) -> str:
    """Return one file for all programs: zsh reads the first line only, and runs the whole file.

    Args:
        scripts: Program -> its file by shtab, which ends with a call of its function.
    """
    bodies = []
    for program, script in scripts.items():
        header, _, body = script.partition("\n")
        body, found, _ = body.rpartition("\nif [[ $zsh_eval_context[-1] == eval ]]")
        if header != f"#compdef {program}" or not found:  # pragma: no cover - another shtab
            raise ConfigError("this version of shtab writes zsh files in another way: use bash.")
        bodies.append(body)
    functions = {program: f"_shtab_{program.replace('-', '_')}" for program in scripts}
    calls = [f'    {program}) {function} "$@" ;;' for program, function in functions.items()]
    named = " ".join(functions)
    return "\n".join(
        [
            f"#compdef {named}",
            *bodies,
            "_redrb_names() {",
            '  compadd -- ${(f)"$(redrb completion $1 $service $words 2>/dev/null)"}',
            "}",
            "_redrb_programs() {",
            "  case $service in",
            *calls,
            "  esac",
            "}",
            "if [[ $zsh_eval_context[-1] == eval || $zsh_eval_context[-1] == file ]]; then",
            f"  compdef _redrb_programs {named}",
            "else",
            '  _redrb_programs "$@"',
            "fi",
        ]
    )


def names(kind: str, words: Sequence[str] = ()) -> Iterator[str]:
    """Yield the names of "tasks" or "weights" of a namespace; none if Redis is away.

    Args:
        kind: "tasks" or "weights".
        words: The line that is completed, from the program on; it may name the namespace.

    A shell splits and expands them, so others than usual names are left out.
    """
    from redrb.connection import connect
    from redrb.connection.deadline import within
    from redrb.errors import RedrbError
    from redrb.keys import is_name
    from redrb.registry import Registry

    try:
        with within(_ANSWER_S), connect(retry_s=0, connect_timeout=_ANSWER_S) as client:
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
    texts = [*words]
    for place, word in enumerate(texts):
        name, equals, value = word.partition("=")
        if name != flag:
            continue
        if equals and value:
            return value
        after = texts[place + 1 :]
        if after[:1] == ["="]:  # bash splits words there
            after = after[1:]
        if after and after[0]:
            return after[0]
    by_variable = texts[:1] != ["redrb"] or bool(_OF_RECIPES.intersection(texts[1:2]))
    named = environment.variable(variable_of("namespace")) if texts and by_variable else None
    return named or "default"


def _asking(kind: str) -> dict[str, Any]:
    """Return how each shell asks for names, with the words of the line that is completed."""
    import shtab

    command = f"redrb completion {kind}"
    return {  # for zsh a function: it would run a command once, when it reads the file
        **shtab.cmd(f'{command} "${{COMP_WORDS[@]}}" 2>/dev/null'),
        "zsh": f"{{_redrb_names {kind}}}",
        "fish": f"({command} (commandline -opc) 2>/dev/null)",
    }


def _parsers(whole: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield the parsers of all programs; that of `redrb` with the flags of recipes in general."""
    from redrb.recipe.command_line import general_parser
    from redrb.workers import stage

    for action in _subcommands(whole):
        action.choices["run"] = run.parser()
        action.choices["settings"] = settings.parser()
    yield whole
    for name in ("redrb-maker", "redrb-trainer"):
        yield general_parser(name, None)
    yield stage.parser()


def _subcommands(parser: argparse.ArgumentParser) -> list[Any]:
    """Return the actions of a parser that have commands of their own."""
    actions = parser._actions  # noqa: SLF001  argparse lists them nowhere else
    return [each for each in actions if isinstance(each, argparse._SubParsersAction)]  # noqa: SLF001


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
