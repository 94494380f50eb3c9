"""Finds the groups that do not fit into one batch with the others."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any

from redrb.codec.layout import GroupLayout, parse_schema
from redrb.codec.wire import PREFIX
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


def kind_of(blob: bytes) -> str:
    """Return the fields and dtypes of an encoded group, masks left out, as a text.

    Groups of different kinds are misfits. Ranks are not part of it: they are deeper in the blob.
    """
    return _kind_of_schema(_schema(blob))


def of_other_kinds(blobs: Sequence[bytes], kind: str) -> list[int]:
    """Return the indices of the encoded groups of another kind."""
    if not blobs:
        return []
    # a schema says how long it is, so none begins with another one
    first, at = _schema(blobs[0]), PREFIX.size
    unlike = [index for index, blob in enumerate(blobs) if not blob.startswith(first, at)]
    if _kind_of_schema(first) == kind:
        return [index for index in unlike if kind_of(blobs[index]) != kind] if unlike else unlike
    return [index for index, blob in enumerate(blobs) if kind_of(blob) != kind]


def _schema(blob: bytes) -> bytes:
    return blob[PREFIX.size : PREFIX.size + PREFIX.unpack_from(blob)[3]]


@lru_cache(maxsize=128)
def _kind_of_schema(schema: bytes) -> str:
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
