"""Settings as attributes of a class, and the sources of their values: a file, variables, flags."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import tomllib
from abc import ABC
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import Field, dataclass, field
from pathlib import Path
from typing import Any, TypeVar, dataclass_transform

from redrb import environment
from redrb.checks import did_you_mean
from redrb.errors import ConfigError
from redrb.options import RangeChecks, check_range, flag_of, url_option, variable_of, yes_or_no
from redrb.options import option as option

KINDS: dict[str, type] = {kind.__name__: kind for kind in (bool, int, float, str)}
"""The types that a setting may have."""

RESERVED = (
    *("recipe", "settings", "help", "json", "makers", "out", "restarts", "fresh"),
    *("on", "gpus_per_maker", "trainer_gpus", "serve"),
)
"""Names of flags that the commands have beside the settings."""

MISSPELT = 0.85
"""Similarity to the name of a setting, of the same type, from which an attribute is refused."""


# not frozen_default: mypy would refuse `self.steps` where a subclass writes `steps = 5`
@dataclass_transform(kw_only_default=True, field_specifiers=(option, url_option))
class RecipeSettings(RangeChecks, ABC):
    """Base of classes whose attributes are settings; each subclass is a frozen dataclass of them.

    In a subclass, an attribute with the name of an inherited setting replaces its default, and
    `name: int = option(...)` adds a setting. All other attributes are ordinary ones. One whose name
    and type are nearly those of a setting is refused as misspelt, unless it is a `ClassVar`.

    Raises:
        ConfigError: A default has the wrong type or is out of range; or a new setting has no known
            type, or the name of a method; or the name of a setting is misspelt.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        inherited = {
            item.name: item
            for base in cls.__mro__[1:]
            if "__dataclass_fields__" in vars(base)
            for item in dataclasses.fields(base)
        }
        own = dict(_declared(cls, inherited))
        annotations = inspect.get_annotations(cls)
        for name in vars(cls).keys() - own.keys():
            _check_spelling(cls, name, str(annotations.get(name, "")), inherited)
        for name, item in own.items():
            setattr(cls, name, item)
        # dataclass makes a field of each annotated attribute; here only settings are fields
        cls.__annotations__ = {name: item.type for name, item in own.items()}
        dataclass(frozen=True, kw_only=True)(cls)
        cls.__annotations__ = {**annotations, **cls.__annotations__}


def settings_of(recipe: type[RecipeSettings]) -> dict[str, Field[Any]]:
    """Return the settings of a class by name, those of its bases first."""
    declared: Any = recipe
    return {item.name: item for item in dataclasses.fields(declared)}


def owner_of(recipe: type[RecipeSettings], name: str) -> type:
    """Return the class that gives a setting its default."""
    return next(base for base in recipe.__mro__ if name in vars(base))


def converted(value: object, kind: type) -> Any:
    """Return a value as its setting's type, or raise ConfigError; an int is a float as well."""
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ConfigError(f"is {value!r:.80}: it must be {_NOUNS[kind]}")
    return value


_NOUNS = {bool: "True or False", int: "an int", float: "a number", str: "a text"}


def _declared(cls: type, inherited: Mapping[str, Any]) -> Iterator[tuple[str, Field[Any]]]:
    """Yield the settings whose default a class gives, each as a field with its type."""
    for name, value in list(vars(cls).items()):
        if not isinstance(value, Field) and name not in inherited:
            continue
        known: Any = inherited.get(name)
        where = f"{cls.__name__}.{name}"
        if isinstance(value, Field):
            item = value
            kind = _kind(cls, name, item, known)
        elif known is not None:
            item, kind = field(metadata=known.metadata), known.type
            item.default = value
        try:
            item.default = converted(item.default, kind)
        except ConfigError as error:
            text = f" The setting {name!r} is: {item.metadata['help']}." if known else ""
            raise ConfigError(f"{where} {error}.{text}") from None
        check_range(where, item, item.default)
        item.type = kind
        yield name, item


def _check_spelling(cls: type, name: str, annotation: str, inherited: Mapping[str, Any]) -> None:
    """Refuse an ordinary attribute that is most likely a misspelt setting."""
    value = vars(cls)[name]
    new = not any(hasattr(base, name) for base in cls.__mro__[1:])
    if not new or not isinstance(value, tuple(KINDS.values())) or "ClassVar" in annotation:
        return
    alike = []
    for each, item in inherited.items():
        with suppress(ConfigError):  # an attribute of another type is no misspelt setting
            converted(value, item.type)
            alike.append(each)
    found = did_you_mean(name, alike, least=MISSPELT)
    if found != ".":
        raise ConfigError(
            f"{cls.__name__}.{name} is no setting{found} If it is an attribute of your own, "
            f"annotate it: {name}: ClassVar[{type(value).__name__}] = {value!r:.40}."
        )


def _kind(cls: type, name: str, item: Field[Any], known: Any) -> type:
    """Return the type of a new setting: of its annotation, or of its default without one."""
    where = f"{cls.__name__}.{name}"
    if name in RESERVED or (known is None and any(hasattr(base, name) for base in cls.__mro__[1:])):
        raise ConfigError(f"{where} cannot be a setting: redrb uses this name, choose another.")
    annotation = inspect.get_annotations(cls).get(name, type(item.default))
    kind = KINDS.get(annotation if isinstance(annotation, str) else annotation.__name__)
    if kind is None or (known is not None and kind is not known.type):
        allowed = "bool, int, float or str" if known is None else known.type.__name__
        raise ConfigError(f"{where} has the type {annotation}: a setting is {allowed}.")
    return kind


S = TypeVar("S", bound=RecipeSettings)


def resolve(
    recipe: type[S], *, flags: Mapping[str, Any], file: Path | None = None, **changes: Any
) -> tuple[S, dict[str, str]]:
    """Return a recipe with the values of all sources, each overriding the one before.

    The second says where the value of each setting comes from, for people.

    Args:
        recipe: Class of the recipe; its defaults come first.
        file: TOML file, after the defaults; then come variables `REDRB_*`.

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
    return recipe(**values), origins


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
        kind: Any = known[name].type
        try:
            found[name] = converted(found[name], kind)
        except ConfigError as error:
            raise ConfigError(f"{file}: {name} {error}.") from None
        check_range(f"{file}: {name}", known[name], found[name])
    return found


def _parsed(variable: str, text: str, item: Field[Any]) -> Any:
    kind: Any = item.type
    try:
        value = yes_or_no(text) if kind is bool else kind(text)
    except (ValueError, argparse.ArgumentTypeError):
        words = "yes or no" if kind is bool else f"of type {kind.__name__}"
        raise ConfigError(f"{variable} is {text!r:.80}: it must be {words}.") from None
    check_range(f"{flag_of(item.name)} (or {variable})", item, value)
    return value


def _origin(recipe: type[RecipeSettings], name: str) -> str:
    owner = owner_of(recipe, name)
    ours, shipped = "redrb.recipe.", "redrb.recipe.examples."
    base = owner.__module__.startswith(ours) and not owner.__module__.startswith(shipped)
    return "default" if base else f"recipe {owner.__name__}"
