"""The command line of programs that run a recipe: `PROGRAM [RECIPE] [FLAGS]`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redrb import environment
from redrb.errors import ConfigError
from redrb.options import CommandParser, add_flag
from redrb.recipe.language import GRPORecipe, PPORecipe
from redrb.recipe.loading import load, shipped
from redrb.recipe.settings import RecipeSettings, resolve, settings_of

RECIPE = "REDRB_RECIPE"
SETTINGS = "REDRB_SETTINGS"

Extend = Callable[[argparse.ArgumentParser], None]


@dataclass(frozen=True)
class Parsed:
    """A command line: its recipe, as it was named, the origin of each setting, and all options."""

    name: str
    recipe: Any
    origins: Mapping[str, str]
    options: argparse.Namespace


def parse(
    program: str,
    description: str | None,
    arguments: Sequence[str],
    *,
    extend: Extend = lambda _: None,
    **changes: Any,
) -> Parsed:
    """Return the recipe that arguments or variables name, with the settings of all sources.

    `--help` ends the process; without a recipe it lists the settings of recipes in general.

    Raises:
        ConfigError: There is no such recipe, or a setting cannot be used.
    """
    # its own flags are known only once the recipe is, so the recipe is looked for first
    general = general_parser(program, description, extend=extend)
    name = _named(general, arguments)
    if name is None:
        general.parse_args(arguments)  # ends with --help, or with a wrong flag
        raise ConfigError(
            f"name a recipe, or set {RECIPE}: a file such as my_recipe.py, a module, or one of "
            f"{', '.join(shipped())}."
        )
    recipe, source = load(name)
    parser = _parser(program, description, recipe, extend=extend)
    options = parser.parse_args(arguments)
    if options.recipe not in (None, name):
        parser.error(f"{options.recipe!r} follows the flags: name the recipe before them.")
    given = {
        item.name: getattr(options, item.name)
        for item in settings_of(recipe).values()
        if hasattr(options, item.name)
    }
    chosen = options.settings or environment.variable(SETTINGS)
    beside = source.with_suffix(".toml") if source else None  # `my.toml` for `my.py`
    file = Path(chosen) if chosen else beside if beside and beside.is_file() else None
    return Parsed(name, *resolve(recipe, flags=given, file=file, **changes), options)


def general_parser(
    program: str, description: str | None, *, extend: Extend = lambda _: None
) -> argparse.ArgumentParser:
    """Return a parser with the settings of recipes in general, as `--help` without a recipe has."""
    return _parser(program, description, PPORecipe, GRPORecipe, extend=extend)


def _named(general: argparse.ArgumentParser, arguments: Sequence[str]) -> str | None:
    """Return the recipe that is named: the first argument, else by the variable, else later on."""
    if arguments and not arguments[0].startswith("-"):
        return arguments[0]
    variable = environment.variable(RECIPE)
    if variable is not None or any(word in ("-h", "--help") for word in arguments):
        return variable
    # flags of the recipe are not known yet
    options, _ = argparse.ArgumentParser.parse_known_args(general, arguments)
    found: str | None = options.recipe
    return found


def _parser(
    program: str, description: str | None, *recipes: type[RecipeSettings], extend: Extend
) -> argparse.ArgumentParser:
    parser = CommandParser(
        prog=program,
        description=description,
        epilog="Values come from the recipe, then from the file of --settings, then from variables "
        "REDRB_*, then from flags; each overrides the ones before. `redrb settings RECIPE` shows "
        "each value and its origin.",
    )
    parser.add_argument(
        "recipe",
        nargs="?",
        metavar="RECIPE",
        help=f"FILE.py[:CLASS], MODULE[:CLASS], or one of {', '.join(shipped())} ({RECIPE}). "
        f"`{program} RECIPE --help` shows the settings that this recipe has",
    )
    parser.add_argument(
        "--settings",
        metavar="FILE",
        help="TOML file with settings; default: the file with the recipe's name and .toml beside "
        f"it, if there is one ({SETTINGS})",
    )
    extend(parser)
    _add_settings(parser, recipes)
    return parser


def _add_settings(parser: argparse.ArgumentParser, recipes: Sequence[type[RecipeSettings]]) -> None:
    known: set[str] = set()
    for recipe in recipes:
        for owner in reversed(recipe.__mro__):
            if not (isinstance(owner, type) and issubclass(owner, RecipeSettings)):
                continue
            new = [
                item
                for item in settings_of(recipe).values()
                if item.name in vars(owner) and item.name not in known  # bases come first
            ]
            if not new:
                continue
            title = (owner.__doc__ or owner.__name__).strip().splitlines()[0].rstrip(".")
            group = parser.add_argument_group(f"{owner.__name__}: {title}")
            for item in new:
                known.add(item.name)
                # left out unless it is given, so that its origin is known
                add_flag(group, item, item.type, default=argparse.SUPPRESS)  # type: ignore[arg-type]
