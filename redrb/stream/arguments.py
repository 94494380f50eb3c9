"""What calls are given: checked before anything is asked of Redis, so that nothing is half done."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from operator import index
from typing import Any, TypeAlias

from redrb.errors import ConfigError
from redrb.experience import Status

AnyStatus: TypeAlias = Status | str
"""A status, or its name."""

MOST = 2**53
"""Lua's numbers are doubles; beyond this they do not tell one integer from the next."""

BEFORE_ANY = -1
"""A current weight version before the first: nothing is stale yet."""


def whole(name: str, value: object, least: int = 0) -> int:
    """Return an integer that was given, of whichever type.

    Raises:
        ConfigError: It is none, or a bool, or below `least`.
    """
    try:
        number = None if isinstance(value, bool) else index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or not least <= number < MOST:
        raise ConfigError(f"{name}={value!r:.80}: it must be an int, at least {least}.")
    return number


def whole_or_none(name: str, value: object, least: int = 0) -> int | None:
    """Return an integer that was given, or None where nothing was; raises as `whole` does."""
    return None if value is None else whole(name, value, least)


def finite(name: str, value: object) -> float:
    """Return a finite number that was given, of whichever type.

    Raises:
        ConfigError: It is no number, or nan, or infinite.
    """
    try:
        number = math.nan if isinstance(value, str | bytes | bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError, OverflowError):  # RuntimeError: of tensors
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"{name}={value!r:.80}: it must be a finite number.")
    return number


def checked_ids(ids: object) -> tuple[int, ...]:
    """Return ids of groups that were given.

    Raises:
        ConfigError: They are no list of ints >= 1.
    """
    if isinstance(ids, str | bytes | Mapping) or not isinstance(ids, Iterable):
        raise ConfigError(f"ids={ids!r:.80}: give a list of ids, such as those that put returned.")
    return tuple(whole("id", each, 1) for each in ids)


def checked_timeout(timeout: object) -> float | None:
    """Return seconds to wait, or None: for ever.

    Raises:
        ConfigError: It is no number >= 0.
    """
    if timeout is None:
        return None
    number = timeout if isinstance(timeout, int | float) else math.nan
    if isinstance(timeout, bool) or not number >= 0:
        raise ConfigError(f"timeout={timeout!r:.80}: give seconds, 0 to look once, or None.")
    return number


def checked_status(status: object) -> Status:
    """Return a status that was given, also by its name.

    Raises:
        ConfigError: There is none of that name.
    """
    try:
        return Status(status)  # type: ignore[arg-type]
    except ValueError:
        known = ", ".join(Status)
        raise ConfigError(f"there is no status {status!r:.80}: use one of {known}.") from None


def checked_statuses(statuses: Any) -> tuple[Status, ...]:
    """Return one or several statuses that were given; raises as `checked_status` does."""
    if isinstance(statuses, str) or not isinstance(statuses, Iterable):
        return (checked_status(statuses),)
    return tuple(map(checked_status, statuses))


def checked_least(count: object, at_least: object) -> tuple[int, int]:
    """Return how many groups to take, and how few would do.

    Raises:
        ConfigError: Not 1 <= at_least <= count.
    """
    try:
        most = whole("count", count, 1)
        least = most if at_least is None else whole("at_least", at_least, 1)
    except ConfigError:
        most, least = 0, 1
    if least > most:
        raise ConfigError(
            f"take({count!r:.80}, at_least={at_least!r:.80}): ints are needed, and 1 <= at_least "
            "<= count."
        ) from None
    return most, least
