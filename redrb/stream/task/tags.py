"""Tags of a group: for each declared name one value, which queries compare."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from redrb.errors import ConfigError, RecordError
from redrb.keys import check_name

if TYPE_CHECKING:
    from redrb.experience.records import BufferItem, Scalar

TagValue: TypeAlias = int | float | str | None
"""Value of one tag of one group; None: the group has no such tag."""

MOST_TAGS = 32
"""Most tags that a task may declare."""

MOST_BYTES = 1024
"""Most UTF-8 bytes of a string."""

MOST_INTEGER = 2**53
"""Largest integer that Redis' doubles hold exactly."""

BEYOND_NUMBERS = 1e300
"""Numbers are nearer to zero, so that every range of them has two ends."""


def declare_tags(names: Iterable[str] | None) -> tuple[str, ...]:
    """Return the tags that a task declares; raises ConfigError for names that are not usable."""
    if isinstance(names, str) or not isinstance(names, Iterable | None):
        raise ConfigError(f"tags={names!r:.80} is no list of names: give one, such as ['level'].")
    declared = tuple(check_name("tag", name) for name in names or ())
    twice = sorted({name for name in declared if declared.count(name) > 1})
    if twice:
        raise ConfigError(f"tags names {', '.join(twice)} twice: name each tag once.")
    if len(declared) > MOST_TAGS:
        raise ConfigError(
            f"tags names {len(declared)} tags, at most {MOST_TAGS} can be declared: name those "
            "that you query, the others stay in the items."
        )
    return declared


def tag_values(
    names: Sequence[str], items: Sequence[BufferItem], given: Mapping[str, Scalar | None] | None
) -> list[TagValue]:
    """Return one value for each declared tag of a group, in the order of `names`.

    A value given at put wins; None there means that the group has no such tag. Otherwise the value
    comes from the samples that have the tag: the value that they share, or the mean of their
    numbers. True counts as 1 and False as 0, so that the mean of verdicts is the success rate.

    Args:
        items: Samples of the group; tags that are not declared are left out.
        given: Values given at put.

    Raises:
        ConfigError: A value is given for a tag that is not declared.
        RecordError: Strings differ, types mix, or a value is not usable.
    """
    given = given or {}
    unknown = [str(name) for name in given if name not in names]
    if unknown:
        raise ConfigError(
            f"tags={{...}} names {', '.join(unknown)}, this task declares "
            f"{', '.join(names) or 'none'}: open the stream with tags=[...] that names it, or put "
            "it into the items' tags, where it is kept but not compared."
        )
    return [
        _checked(name, given[name]) if name in given else _common(name, items) for name in names
    ]


def as_number(value: float) -> float | None:
    """Return a number that a double holds exactly, with True as 1; None for others."""
    if isinstance(value, int):
        return int(value) if abs(value) <= MOST_INTEGER else None
    return None if math.isnan(value) else float(value)


def _common(name: str, items: Sequence[BufferItem]) -> TagValue:
    values = [_checked(name, item.tags[name]) for item in items if name in item.tags]
    numbers = [value for value in values if isinstance(value, int | float)]
    strings = {value for value in values if isinstance(value, str)}
    if (strings and numbers) or len(strings) > 1:
        shown = ", ".join(sorted({repr(value) for value in values})[:4])
        raise RecordError(
            f"tag {name!r} is {shown} in samples of one group, which can have one "
            f"value only: give it at put, tags={{{name!r}: ...}}.",
            field="tags",
        )
    if strings:
        return strings.pop()
    if not numbers:
        return None
    same = all(number == numbers[0] for number in numbers)
    return numbers[0] if same else math.fsum(numbers) / len(numbers)


def _checked(name: str, value: Scalar | None) -> TagValue:
    """Return a value that a tag can have, or raise RecordError."""
    if value is None:
        return None
    if isinstance(value, str):
        return _checked_string(name, value)
    if not isinstance(value, int | float):
        raise RecordError(
            f"tag {name!r} is a {type(value).__name__}: a tag is a str, a number or a bool.",
            field="tags",
        )
    number = as_number(value)
    if number is None or abs(number) >= BEYOND_NUMBERS:
        raise RecordError(
            f"tag {name!r} is {value!r}, which no tag can be: finite numbers below 1e300 and "
            "integers up to 2**53 can. Give a float or a str, or leave the tag out.",
            field="tags",
        )
    return number


def _checked_string(name: str, value: str) -> str:
    try:
        size = len(value.encode())
    except UnicodeEncodeError as error:
        raise RecordError(f"tag {name!r} is not valid Unicode: {error}.", field="tags") from error
    if size > MOST_BYTES:
        raise RecordError(
            f"tag {name!r} is a string of {size} bytes, a tag has at most {MOST_BYTES}: put "
            "long text into extras.",
            field="tags",
        )
    return value
