"""Checks of arguments: each returns the value in its plain type, or raises ConfigError."""

from __future__ import annotations

import difflib
import math
import shlex
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from operator import index

from redrb.errors import ConfigError

MOST = 2**53 - 1
"""Largest integer: Lua and Redis compute with doubles, which merge larger integers."""


def _is_bool(value: object) -> bool:
    """Return whether a value is a bool; those of torch and numpy 1 pass as integers."""
    return isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool")


def checked_int(name: str, value: object, least: int = 0, most: int = MOST) -> int:
    """Return an integer, of numpy or torch too, from `least` to `most`; else raises ConfigError."""
    try:
        number = None if _is_bool(value) else index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or not least <= number <= most:
        limits = f"at least {least}" if most == MOST else f"from {least} to {most}"
        raise ConfigError(f"{name}={value!r:.80}: it must be an int, {limits}.")
    return number


def checked_int_or_none(name: str, value: object, least: int = 0, most: int = MOST) -> int | None:
    """Return an integer, or None; raises as `checked_int` does."""
    return None if value is None else checked_int(name, value, least, most)


def checked_number(name: str, value: object) -> float:
    """Return a finite number, of numpy or torch too; raises ConfigError for others, and bools."""
    is_complex = "complex" in str(getattr(value, "dtype", ""))  # float() drops a part of them
    try:
        is_other = isinstance(value, str | bytes) or is_complex or _is_bool(value)
        number = math.nan if is_other else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError, OverflowError):  # RuntimeError: of tensors
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"{name}={value!r:.80}: it must be a finite number.")
    return number


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise ConfigError, with a list of the choices, for a word that is none of them."""
    if value not in choices:
        quoted = [f'"{choice}"' for choice in choices]
        raise ConfigError(f"{name}={value!r:.80}: use {', '.join(quoted[:-1])} or {quoted[-1]}.")


def did_you_mean(name: str, known: Iterable[str], *, least: float = 0.6) -> str:
    """Return the end of a sentence about an unknown name: "; did you mean ...?", or ".".

    `least` is the least similarity of names, from 0 to 1, as difflib measures it.
    """
    names = difflib.get_close_matches(name, list(known), n=3, cutoff=least)
    return f"; did you mean {' or '.join(names)}?" if names else "."


def require_package(package: str, *, extra: str) -> None:
    """Raise ConfigError with the command that installs `package`, if it is missing."""
    try:
        found = find_spec(package)
    except ModuleNotFoundError:  # the package above it is missing
        found = None
    if found is None:
        raise ConfigError(f"{package} is not installed: {install_command(extra)}.")


def install_command(extra: str) -> str:
    """Return the command that installs the packages of an extra.

    It names the packages, since no package index has redrb.
    """
    from importlib import metadata  # takes a while, and only messages need it

    try:
        required = metadata.requires("redrb") or ()
    except metadata.PackageNotFoundError:  # redrb is on PYTHONPATH, and not installed
        return f"pip install '.[{extra}]' in the clone of redrb"
    end = f'; extra == "{extra}"'
    packages = [line.removesuffix(end) for line in required if line.endswith(end)]
    return shlex.join(["pip", "install", *packages])
