"""Finds the groups that do not fit into one batch with the others."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any

from redrb.codec.layout import GroupLayout, parse_schema
from redrb.experience.padding import MASKS
from redrb.unpacking import Reading


def misfits(layouts: Sequence[GroupLayout], names: Collection[str] | None = None) -> list[int]:
    """Return the indices of the groups whose fields, ranks or dtypes differ from most others'.

    Args:
        names: Names of the fields that are in the batch; None: all.
    """
    kinds = [_kind(layout, names) for layout in layouts]
    usual = Counter(kinds).most_common(1)[0][0] if kinds else None
    return [index for index, kind in enumerate(kinds) if kind != usual]


def _kind(layout: GroupLayout, names: Collection[str] | None) -> frozenset[Any]:
    """Return the facts that must be equal in a batch: fields, dtypes, ranks, inner dimensions."""
    return frozenset(
        (field.name,) if shape is None else (field.name, field.dtype.code, len(shape), shape[1:])
        for column, field in enumerate(layout.fields)
        for shape in layout.shapes(column)
        if field.name not in MASKS  # a missing mask can be made
        and (names is None or field.name in names)
    )


@lru_cache(maxsize=128)
def kind_of(schema: bytes) -> str:
    """Return the fields and dtypes that the schema of a group names, masks left out, as a text."""
    named = {each.name: str(each.dtype.tensor) for each in parse_schema(schema)}
    return json.dumps({name: named[name] for name in sorted(named) if name not in MASKS})


def difference(kind: str, usual: str) -> tuple[str, str]:
    """Return the first field in which a kind differs from another, `usual`, and how."""
    fields: dict[str, str] = json.loads(kind)
    with Reading("the setting `kind` of a task"):
        others = json.loads(usual)
        if not isinstance(others, dict) or not all(
            isinstance(each, str) for each in others.values()
        ):
            raise ValueError(f"{usual!r:.40} names no fields and dtypes")
    for name in sorted(fields.keys() | others.keys()):
        if name not in fields:
            return name, "is missing, and is a tensor in other groups"
        if name not in others:
            return name, "is a tensor, and is missing in other groups"
        if fields[name] != others[name]:
            return name, f"is {fields[name]}, and {others[name]} in other groups"
    return "", ""
