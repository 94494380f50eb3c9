"""Settings of commands: one frozen dataclass gives flags, REDRB_* variables and `--help`."""

from __future__ import annotations

import argparse
from dataclasses import MISSING, Field, field, fields
from typing import Any, TypeVar, get_type_hints

from redrb import environment

T = TypeVar("T")


def option(default: Any, text: str) -> Any:
    """Return a dataclass field with a default and the text that `--help` shows for it."""
    return field(default=default, metadata={"help": text})


def add_options(parser: argparse.ArgumentParser, *settings: type) -> None:
    """Add a flag for each field of these dataclasses; its default may come from a variable.

    Field `group_size` becomes `--group-size`, and `REDRB_GROUP_SIZE` gives its default.
    """
    for owner in settings:
        hints = get_type_hints(owner)
        for item in fields(owner):
            _add(parser, item, hints[item.name])


def settings_from(options: argparse.Namespace, owner: type[T]) -> T:
    """Return the dataclass `owner` as the parsed options say."""
    return owner(**{item.name: getattr(options, item.name) for item in fields(owner)})  # type: ignore[arg-type]


def variable_of(name: str) -> str:
    """Return the variable that gives the default of field `name`."""
    return environment.PREFIX + name.upper()


def _add(parser: argparse.ArgumentParser, item: Field[Any], kind: Any) -> None:
    if item.default is MISSING:
        raise TypeError(f"{item.name} needs a default to become an option")
    variable = variable_of(item.name)
    shown = "" if item.default in ("", None) else f"default: {item.default}; "
    parser.add_argument(
        f"--{item.name.replace('_', '-')}",
        dest=item.name,
        # argparse converts a default that is a string, and complains like about a flag
        default=environment.variable(variable, str(item.default)),
        type=kind,
        metavar=kind.__name__.upper(),
        help=f"{item.metadata['help']} ({shown}{variable})",
    )
