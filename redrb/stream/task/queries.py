"""`parse_where`: parses a query over a task's tags, and returns it in one normal form.

    {"source": "math", "scores_gt": 0.8}
    {"source": "math", "scores": {"$gt": 0.8}, "$or": [{"difficulty": 1}, {"difficulty": 2}]}

The normal form, for `include/where.lua`, is JSON: a tree of `{"all": [...]}`, `{"any": [...]}` and
conditions on one tag, `{"tag": "source", "values": ["math", [0.0, 1.0]], "inverted": false}`. Each
value is a string, or a range of numbers that includes both ends: every double has a next one, so
`> 0` begins at 5e-324. An inverted condition matches all other values, and groups without the tag.
All conditions on one tag in one place become one condition.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from redrb.errors import ConfigError
from redrb.stream.task.tags import BEYOND_NUMBERS, as_number

MOST_DEPTH = 16
"""Most levels of `$and` and `$or`."""

MOST_CONDITIONS = 256
"""Most conditions in one query."""

MOST_VALUES = 1024
"""Most values in all lists of `$in` and `$not_in` of one query together."""

Ranges: TypeAlias = tuple[tuple[float, float], ...]
"""Pairs `low, high` of doubles, from `low` to below `high`; sorted, and apart from each other."""

_LOGIC = {"$and": True, "$or": False}


@dataclass(frozen=True, slots=True)
class _Values:
    """A set of values of one tag; inverted, all other values, and groups without the tag."""

    ranges: Ranges = ()
    strings: frozenset[str] = frozenset()
    inverted: bool = False

    def invert(self) -> _Values:
        return _Values(self.ranges, self.strings, not self.inverted)

    def union(self, other: _Values) -> _Values:
        if self.inverted and not other.inverted:
            return other.union(self)
        if self.inverted:
            return self.invert().intersection(other.invert()).invert()
        if other.inverted:
            return other.invert().without(self).invert()
        return _Values(_union(self.ranges, other.ranges), self.strings | other.strings)

    def intersection(self, other: _Values) -> _Values:
        if self.inverted or other.inverted:
            return self.invert().union(other.invert()).invert()
        return self.without(_Values(_rest(other.ranges), self.strings - other.strings))

    def without(self, other: _Values) -> _Values:
        ranges = _rest(_union(_rest(self.ranges), other.ranges))
        return _Values(ranges, self.strings - other.strings)


@dataclass(frozen=True, slots=True)
class _Condition:
    """A condition: the tag has one of these values."""

    tag: str
    values: _Values

    def form(self) -> dict[str, Any]:
        ranges = [(low, math.nextafter(high, -math.inf)) for low, high in self.values.ranges]
        listed = [*ranges, *sorted(self.values.strings)]
        return {"tag": self.tag, "values": listed, "inverted": self.values.inverted}


@dataclass(frozen=True, slots=True)
class _Joined:
    """Conditions of which all must hold (`every`), or one."""

    every: bool
    parts: tuple[_Condition | _Joined, ...]

    def form(self) -> dict[str, Any]:
        return {"all" if self.every else "any": [part.form() for part in self.parts]}


def parse_where(where: Mapping[str, Any], tags: Sequence[str]) -> str:
    """Return a query as JSON for the scripts `take` and `count`; "" for a query without conditions.

    Args:
        where: The query, in either spelling; all entries of one dict must hold.

    Raises:
        ConfigError: The query names an unknown tag or operator, an operand has the wrong type, or
            the query is too large.
    """
    parsed = _Parser(tags).parse(where)
    if parsed == _Joined(every=True, parts=()):
        return ""
    try:
        text = json.dumps(parsed.form(), ensure_ascii=False, separators=(",", ":"))
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"the query holds a string that is not valid Unicode: {error}."
        ) from error
    return text


def no_query(task: str) -> ConfigError:
    """Return the error of a take with a query from a task whose order draws."""
    return ConfigError(
        f"task {task!r} draws its groups, and a take with where= goes through them in their order: "
        'take without where=, or give the task an order that does not draw, such as "fifo" or '
        '"priority".'
    )


class _Parser:
    """Parses one query, and counts its conditions and values."""

    def __init__(self, tags: Sequence[str]) -> None:
        self.tags = tuple(tags)
        self.conditions = 0
        self.values = 0

    def parse(self, where: object, depth: int = 0) -> _Condition | _Joined:
        if not isinstance(where, Mapping):
            raise ConfigError(f"a query is a dict of tags, not {where!r}: {self._known()}")
        if depth > MOST_DEPTH:
            raise ConfigError(f"the query nests deeper than {MOST_DEPTH} levels: flatten it.")
        return _join([self._entry(key, value, depth) for key, value in where.items()], every=True)

    def _entry(self, key: object, value: object, depth: int) -> _Condition | _Joined:
        if isinstance(key, str) and key in _LOGIC:
            if not isinstance(value, Sequence) or isinstance(value, str | bytes) or not value:
                raise ConfigError(f"{key} joins a list of queries, at least one, not {value!r}.")
            return _join([self.parse(each, depth + 1) for each in value], every=_LOGIC[key])
        name, suffix = self._split(key)
        if suffix or not isinstance(value, Mapping):
            return self._condition(name, suffix or "eq", str(key), value)
        if not value:
            raise ConfigError(f"{name}: {{}} holds no operator: {self._known()}")
        parts = []
        for operator, operand in value.items():
            dollar = isinstance(operator, str) and operator.startswith("$")
            if not dollar or operator[1:] not in _OPERATORS:
                raise ConfigError(f"{name} has no operator {operator!r}: {self._known()}")
            parts.append(self._condition(name, operator[1:], f"{name}: {operator}", operand))
        return _join(parts, every=True)

    def _condition(self, name: str, operator: str, spelled: str, operand: object) -> _Condition:
        values = _OPERATORS[operator](spelled, operand)
        self.conditions += 1
        if operator in ("in", "not_in") and isinstance(operand, Collection):
            self.values += len(operand)
        if self.conditions > MOST_CONDITIONS or self.values > MOST_VALUES:
            raise ConfigError(
                f"the query holds more than {MOST_CONDITIONS} conditions, or lists more than "
                f"{MOST_VALUES} values: ask in several queries."
            )
        return _Condition(name, values)

    def _split(self, key: object) -> tuple[str, str]:
        """Return tag and suffix of a key; the longest declared name wins."""
        if isinstance(key, str):
            for suffix in ("", *sorted(_OPERATORS, key=len)):
                name = key.removesuffix(f"_{suffix}") if suffix else key
                if name in self.tags and (name != key or not suffix):
                    return name, suffix
        raise ConfigError(f"the query names {key!r}: {self._known()}")

    def _known(self) -> str:
        names = ", ".join(self.tags)
        declared = f"the tags {names}" if names else "no tags (open the stream with tags=[...])"
        suffixes = ", ".join(f"_{each}" for each in _OPERATORS)
        dollars = ", ".join(f"${each}" for each in _OPERATORS)
        return (
            f"this task declares {declared}. Write the tag alone, or with a suffix "
            f"({suffixes}), or as {{tag: {{operator: operand}}}} with {dollars}; join with $and "
            "and $or."
        )


def _join(parts: Sequence[_Condition | _Joined], *, every: bool) -> _Condition | _Joined:
    """Join conditions; conditions on one tag are merged, and joins of the same kind flattened."""
    values: dict[str, _Values] = {}
    rest: list[_Joined] = []
    for part in _flat(parts, every=every):
        if isinstance(part, _Joined):
            rest.append(part)
        elif part.tag not in values:
            values[part.tag] = part.values
        elif every:
            values[part.tag] = values[part.tag].intersection(part.values)
        else:
            values[part.tag] = values[part.tag].union(part.values)
    joined: list[_Condition | _Joined] = [
        *(_Condition(tag, each) for tag, each in values.items()),
        *rest,
    ]
    return joined[0] if len(joined) == 1 else _Joined(every, tuple(joined))


def _flat(parts: Sequence[_Condition | _Joined], *, every: bool) -> list[_Condition | _Joined]:
    flat: list[_Condition | _Joined] = []
    for part in parts:
        same = isinstance(part, _Joined) and part.every == every
        flat += part.parts if isinstance(part, _Joined) and same else [part]
    return flat


def _union(first: Ranges, second: Ranges) -> Ranges:
    merged: list[tuple[float, float]] = []
    for low, high in sorted((*first, *second)):
        if merged and low <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return tuple(merged)


def _rest(ranges: Ranges) -> Ranges:
    """Return the ranges between and beside the given ones."""
    cuts = [-BEYOND_NUMBERS, *(cut for each in ranges for cut in each), BEYOND_NUMBERS]
    pairs = zip(cuts[::2], cuts[1::2], strict=True)
    return tuple((low, high) for low, high in pairs if low < high)


def _range(low: float, high: float) -> _Values:
    """Return the numbers from `low` to below `high`."""
    low, high = max(low, -BEYOND_NUMBERS), min(high, BEYOND_NUMBERS)
    return _Values(((low, high),) if low < high else ())


def _after(number: float) -> float:
    return math.nextafter(number, math.inf)


def _number(spelled: str, operand: object) -> float:
    if not isinstance(operand, int | float):
        raise ConfigError(f"{spelled} compares numbers, and {operand!r} is no number.")
    number = as_number(operand)
    if number is None:
        raise ConfigError(
            f"{spelled}: {operand!r} cannot be compared: give a number other than nan, an "
            "integer of at most 2**53."
        )
    return float(number)


def _equal(spelled: str, operand: object) -> _Values:
    if isinstance(operand, str):
        return _Values(strings=frozenset((operand,)))
    if not isinstance(operand, int | float):
        raise ConfigError(
            f"{spelled} compares with one str, number or bool, not with {operand!r}: for several "
            "values use $in or the suffix _in."
        )
    number = _number(spelled, operand)
    return _range(number, _after(number))


def _one_of(spelled: str, operand: object) -> _Values:
    if not isinstance(operand, list | tuple | set | frozenset) or not operand:
        raise ConfigError(f"{spelled} needs a list with at least one value, not {operand!r}.")
    found = [_equal(spelled, each) for each in operand]
    ranges = _union((), tuple(each for values in found for each in values.ranges))
    return _Values(ranges, frozenset().union(*(values.strings for values in found)))


def _between(spelled: str, operand: object) -> _Values:
    if not isinstance(operand, list | tuple) or len(operand) != 2:
        raise ConfigError(f"{spelled} needs two numbers, [lowest, highest], not {operand!r}.")
    low, high = (_number(spelled, each) for each in operand)
    if low > high:
        raise ConfigError(f"{spelled}: {low!r} is above {high!r}: give the lowest first.")
    return _range(low, _after(high))


_OPERATORS: dict[str, Callable[[str, object], _Values]] = {
    "eq": _equal,
    "ne": lambda spelled, operand: _equal(spelled, operand).invert(),
    "gt": lambda spelled, operand: _range(_after(_number(spelled, operand)), math.inf),
    "gte": lambda spelled, operand: _range(_number(spelled, operand), math.inf),
    "lt": lambda spelled, operand: _range(-math.inf, _number(spelled, operand)),
    "lte": lambda spelled, operand: _range(-math.inf, _after(_number(spelled, operand))),
    "in": _one_of,
    "not_in": lambda spelled, operand: _one_of(spelled, operand).invert(),
    "between": _between,
}
"""Operator -> function that returns the values that match, of the spelling and the operand."""
