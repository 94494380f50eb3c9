"""Where the values of settings come from: the recipe, a TOML file, variables, flags."""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Mapping
from dataclasses import Field, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from redrb import environment
from redrb.checks import did_you_mean
from redrb.errors import ConfigError
from redrb.options import check_range, flag_of, variable_of, yes_or_no
from redrb.recipe.settings import RecipeSettings, converted, owner_of, settings_of

S = TypeVar("S", bound=RecipeSettings)


@dataclass(frozen=True, kw_only=True)
class Resolved(Generic[S]):
    """A recipe with the values of its settings.

    Attributes:
        recipe: The recipe.
        origins: Where the value of each setting comes from, by name, for people.
    """

    recipe: S
    origins: Mapping[str, str]


def resolve(
    recipe: type[S], *, flags: Mapping[str, Any], file: Path | None = None, **changes: Any
) -> Resolved[S]:
    """Return a recipe with the values of all sources, each overriding the one before.

    Args:
        recipe: Class of the recipe; its defaults come first.
        flags: Parsed values of the flags that were given, by name of the setting; they come last.
        file: TOML file, after the defaults; then come variables `REDRB_*`.
        changes: Values for settings that no source sets.

    Raises:
        ConfigError: A value cannot be used, a key of the file is unknown, or it cannot be read.
    """
    known = settings_of(recipe)
    values: dict[str, Any] = dict(changes)
    origins = {name: _origin(recipe, name) for name in known}
    for name, value in (read_file(file, known) if file else {}).items():
        values[name] = value
        origins[name] = str(file)
    for name, item in known.items():
        text = environment.variable(variable_of(name))
        if text is not None:
            values[name] = _parsed(variable_of(name), text, item)
            origins[name] = variable_of(name)
    for name, value in flags.items():
        values[name] = value
        origins[name] = flag_of(name)
    return Resolved(recipe=recipe(**values), origins=origins)


def read_file(file: Path, known: Mapping[str, Field[Any]]) -> dict[str, Any]:
    """Return the settings in a TOML file, by name.

    Raises:
        ConfigError: The file cannot be read, or has an unknown key, or a value cannot be used.
    """
    try:
        found = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"the settings in {file} cannot be read: {why}.") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file} is no TOML: {error}.") from error
    for name in found:
        if name not in known:
            raise ConfigError(f"{file}: there is no setting {name!r}{did_you_mean(name, known)}")
    return {name: _checked(f"{file}: {name}", value, known[name]) for name, value in found.items()}


def _parsed(variable: str, text: str, item: Field[Any]) -> Any:
    """Return the value of a variable."""
    kind: Any = item.type
    try:
        value = yes_or_no(text) if kind is bool else kind(text)
    except (ValueError, argparse.ArgumentTypeError):
        words = "yes or no" if kind is bool else f"of type {kind.__name__}"
        raise ConfigError(f"{variable} is {text!r:.80}: it must be {words}.") from None
    check_range(f"{flag_of(item.name)} (or {variable})", item, value)
    return value


def _checked(where: str, value: Any, item: Field[Any]) -> Any:
    kind: Any = item.type
    try:
        found = converted(value, kind)
    except ConfigError as error:
        raise ConfigError(f"{where} {error}.") from None
    check_range(where, item, found)
    return found


def _origin(recipe: type[RecipeSettings], name: str) -> str:
    owner = owner_of(recipe, name)
    return "default" if owner.__module__.startswith("redrb.recipe.") else f"recipe {owner.__name__}"
