"""What users type: public names with their signatures, commands with their flags, errors.

`python -m tests.public_names` writes them anew to tests/unit/golden/public_names.txt. Each line
that goes from there needs a line in the changelog that says what to use instead.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import re
from collections.abc import Callable, Iterator
from enum import EnumType
from pathlib import Path
from types import FunctionType as Function
from typing import Any, get_origin

from redrb import errors
from redrb.cli import __main__ as cli
from redrb.cli.processes import maker, stage, trainer

GOLDEN = Path(__file__).parent / "unit" / "golden" / "public_names.txt"

MODULES = (
    "redrb",
    "redrb.algorithms",
    "redrb.watch.groups",
    "redrb.codec",
    "redrb.train.engines",
    "redrb.train.episodes",
    "redrb.experience",
    "redrb.compat.coati",
    "redrb.compat.miles",
    "redrb.compat.openai_agents",
    "redrb.compat.openenv",
    "redrb.compat.slime",
    "redrb.compat.torchrl",
    "redrb.compat.transfer_queue",
    "redrb.compat.trl",
    "redrb.compat.verifiers",
    "redrb.gateway.client",
    "redrb.recipe",
    "redrb.compat.xtuner",
    "redrb.train",
    "redrb.stream",
    "redrb.table",
    "redrb.weights",
)
"""Modules that users import from."""

COMMANDS: dict[str, Callable[[list[str]], object]] = {
    "redrb": cli.main,
    "redrb-maker": maker.main,
    "redrb-stage": stage.main,
    "redrb-trainer": trainer.main,
}

_COMMAND = re.compile(r"^    ([a-z-]+)", re.MULTILINE)
_FLAG = re.compile(r"--[a-z][a-z0-9-]*")


def lines() -> Iterator[str]:
    """Yield a line for each thing that users type."""
    shown: set[int] = set()
    for module in MODULES:
        found = importlib.import_module(module)
        for name in sorted(getattr(found, "__all__", ())) or _own_names(found):
            yield from _of_name(f"{module}.{name}", getattr(found, name), shown)
    for name, error in sorted(vars(errors).items()):
        if isinstance(error, type) and issubclass(error, Exception) and name[0] != "_":
            yield f"error {name}({', '.join(base.__name__ for base in error.__bases__)})"
    for command, main in COMMANDS.items():
        yield from _of_command(command, main, [])


def _own_names(module: Any) -> list[str]:
    public = (name for name in vars(module) if name[0] != "_")
    return sorted(
        name
        for name in public
        if getattr(getattr(module, name), "__module__", "") == module.__name__
    )


def _of_name(name: str, found: Any, shown: set[int]) -> Iterator[str]:
    """Yield a name, and the members of a class where it is met first."""
    yield f"{name}{_signature(found)}"
    if not isinstance(found, type) or id(found) in shown:
        return
    shown.add(id(found))
    members: dict[str, Any] = {}
    for base in reversed(found.__mro__):
        if base.__module__.startswith("redrb"):
            members |= vars(base)
    for member, value in sorted(members.items()):
        if member[0] != "_" and isinstance(value, property | staticmethod | classmethod | Function):
            signature = "" if isinstance(value, property) else _signature(getattr(found, member))
            yield f"{name}.{member}{signature}"


def _signature(found: Any) -> str:
    """Return the parameters with their defaults; "" where they depend on Python's version."""
    if isinstance(found, EnumType) or get_origin(found) is not None:
        return ""
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        return ""
    bare = [
        each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()
    ]
    shown = str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))
    return re.sub(r" at 0x[0-9a-f]+", "", shown)


def _of_command(
    command: str, main: Callable[[list[str]], object], words: list[str]
) -> Iterator[str]:
    text = _help(main, words)
    flags = sorted(set(_FLAG.findall(text)) - {"--help"})
    yield " ".join([command, *words, *flags])
    for name in _COMMAND.findall(text.partition("  COMMAND\n")[2]):
        yield from _of_command(command, main, [*words, name])


def _help(main: Callable[[list[str]], object], words: list[str]) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main([*words, "--help"])
    return printed.getvalue()


if __name__ == "__main__":
    GOLDEN.write_text("".join(f"{line}\n" for line in lines()))
