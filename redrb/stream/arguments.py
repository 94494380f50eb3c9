"""Checks of the arguments of stream methods, made before any request to Redis."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeAlias

from redrb.checks import checked_int
from redrb.errors import ConfigError
from redrb.experience import Status

AnyStatus: TypeAlias = Status | str
"""A status or its name."""

_PERIODS = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}
_PERIOD = re.compile(r"(\d{1,9})([smhdw])")

BEFORE_ANY = -1
"""Current weight version before the first publication: no group is stale."""


def checked_ids(ids: object, least: int = 1) -> tuple[int, ...]:
    """Return the ids of groups as ints; raises ConfigError if it is no list of ints >= `least`."""
    if isinstance(ids, str | bytes | Mapping) or not isinstance(ids, Iterable):
        raise ConfigError(f"ids={ids!r:.80}: give a list of ids, such as those that put returned.")
    return tuple(checked_int("id", each, least) for each in ids)


def checked_letters(ids: object) -> tuple[int, ...]:
    """Return the ids of dead letters to requeue; raises ConfigError for others and 0."""
    if isinstance(ids, Collection) and not isinstance(ids, str | bytes | Mapping) and 0 in ids:
        raise ConfigError(
            "dead letters with the id 0 are groups in parts that were never put, so there is no "
            "place to which they could return: leave the id out, and put their samples as a new "
            "group, stream.put(letter.items). drop_dead_letters([0]) deletes them all."
        )
    return checked_ids(ids)


def checked_tensors(names: object) -> frozenset[str] | None:
    """Return names of tensors, None for all; raises ConfigError for a text, none, and no names."""
    if names is None:
        return None
    is_text = isinstance(names, str | bytes | Mapping)
    found = list(names) if isinstance(names, Iterable) and not is_text else []
    if not found or not all(isinstance(name, str) for name in found):
        raise ConfigError(f'tensors={names!r:.80}: give a list such as ["sequences", "reward"].')
    return frozenset(found)


def checked_status(status: object) -> Status:
    """Return a status, given as one or by its name; raises ConfigError for another name."""
    try:
        return Status(status)  # type: ignore[arg-type]
    except ValueError:
        known = ", ".join(Status)
        raise ConfigError(f"there is no status {status!r:.80}: use one of {known}.") from None


def checked_statuses(statuses: Any) -> tuple[Status, ...]:
    """Return one or several statuses as a tuple; raises as `checked_status` does."""
    if isinstance(statuses, str) or not isinstance(statuses, Iterable):
        return (checked_status(statuses),)
    return tuple(map(checked_status, statuses))


def checked_period_ms(name: str, period: object) -> int:
    """Return a period such as "30m" in milliseconds; raises ConfigError for another text."""
    matched = _PERIOD.fullmatch(period) if isinstance(period, str) else None
    if matched is None or int(matched[1]) == 0:
        raise ConfigError(
            f'{name}={period!r:.80}: write a period such as "90s", "30m", "12h" or "7d".'
        )
    return int(matched[1]) * _PERIODS[matched[2]]


def checked_least(count: object, at_least: object) -> tuple[int, int]:
    """Return the groups to take, and the fewest to accept; else raises ConfigError."""
    try:
        most = checked_int("count", count, 1)
        least = most if at_least is None else checked_int("at_least", at_least, 1)
    except ConfigError:
        most, least = 0, 1
    if least > most:
        raise ConfigError(
            f"take({count!r:.80}, at_least={at_least!r:.80}): ints are needed, and 1 <= at_least "
            "<= count."
        ) from None
    return most, least
