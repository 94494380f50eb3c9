"""Packs the head of each group's blob: prefix, schema, header and extras."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any, TypeAlias

import msgpack

from redrb.codec.bodies import EncodedColumn
from redrb.codec.columns import Column, Grouping
from redrb.codec.lone import LoneColumn
from redrb.codec.metadata import Metadata, one_or_all
from redrb.codec.wire import (
    FIELD_CODES,
    MAGIC,
    MAX_HEADER_BYTES,
    MAX_SCHEMA_BYTES,
    PREFIX,
    VERSION,
)
from redrb.errors import EncodeError
from redrb.experience.padding import Shape

Layout: TypeAlias = tuple[tuple[int | None, ...], Sequence[Any], Sequence[Shape]]
"""For one group: the wire code of each column (None: the group lacks it), the header's entry for
each present column, and the shapes that these entries refer to."""


def pack_heads(
    columns: Sequence[Column], layouts: Iterable[Layout], metadata: Sequence[Metadata]
) -> Iterator[bytes]:
    """Yield the head of each group.

    Args:
        columns: The fields, in the order of the layouts' codes.
        layouts: One for each group, from `layouts_of_lone` or `layouts_of_groups`.
        metadata: One for each group.

    Raises:
        EncodeError: A header or a schema is longer than readers allow.
    """
    packer = msgpack.Packer()
    pack, pack_array_header = packer.pack, packer.pack_array_header
    schemas: dict[tuple[int | None, ...], bytes] = {}
    last: tuple[Any, Any, Any] = (None, None, None)
    for (wires, entries, shapes), group in zip(layouts, metadata, strict=False):
        schema = schemas.get(wires)
        if schema is None:
            schema = schemas[wires] = _pack_schema(columns, wires)
        if shapes is not last[1] or group is not last[2]:  # usually they are the last group's
            start = pack_array_header(3 + len(group.tail)) + pack(group.samples)
            end = b"".join((pack(shapes), *map(pack, group.tail)))
        if entries != last[0]:
            middle = pack(entries)
        last = (entries, shapes, group)
        size = len(start) + len(middle) + len(end)
        if size > MAX_HEADER_BYTES:
            raise EncodeError(
                f"a group's header has {size} bytes, the limit is {MAX_HEADER_BYTES}: "
                "use fewer tags or put smaller groups."
            )
        prefix = PREFIX.pack(MAGIC, VERSION, 0, len(schema), size, len(group.extras))
        yield b"".join((prefix, schema, start, middle, end, group.extras))


def _pack_schema(columns: Sequence[Column], wires: Sequence[int | None]) -> bytes:
    schema: bytes = msgpack.packb(
        [
            (FIELD_CODES.get(column.name, column.name), column.dtype.code, wire)
            for column, wire in zip(columns, wires, strict=True)
            if wire is not None
        ]
    )
    if len(schema) > MAX_SCHEMA_BYTES:
        raise EncodeError("the names in `tensors` are too long: shorten them.")
    return schema


def layouts_of_lone(columns: Sequence[Column], encoded: Sequence[LoneColumn]) -> Iterable[Layout]:
    """Return the layouts of groups of one sample whose shapes are all alike: the fast path."""
    table: dict[Shape, int] = {}
    entries: list[Iterable[Any]] = []
    for column, encoding in zip(columns, encoded, strict=True):
        ref = table.setdefault(column.shape or (), len(table))
        if encoding.notes is None:
            entries.append(repeat(ref))
        else:
            entries.append([(ref, *note) if note else ref for note in encoding.notes])
    if not columns:
        return repeat(((), (), ()))
    wires = zip(*(encoding.wires for encoding in encoded), strict=True)
    return zip(wires, zip(*entries, strict=False), repeat(tuple(table)), strict=False)


def layouts_of_groups(
    columns: Sequence[Column], encoded: Sequence[EncodedColumn], grouping: Grouping
) -> Iterator[Layout]:
    """Yield the layouts of groups of any size and shapes."""
    spans = zip(grouping.firsts.tolist(), grouping.counts.tolist(), strict=True)
    for group, (first, count) in enumerate(spans):
        table: dict[Shape, int] = {}
        wires: list[int | None] = []
        entries: list[Any] = []
        for column, encoding in zip(columns, encoded, strict=True):
            refs = [
                None if shape is None else table.setdefault(shape, len(table))
                for shape in column.shapes[first : first + count]
            ]
            here = any(ref is not None for ref in refs)
            wires.append(encoding.wires[group] if here else None)
            if here:
                runs = [part[first : first + count].tolist() for part in encoding.runs or ()]
                entries.append(_entry(refs, runs))
        yield tuple(wires), entries, tuple(table)


def _entry(refs: list[int | None], runs: list[list[int]]) -> Any:
    """Return a column's entry in the header, see `docs/wire-format.md`."""
    ref = one_or_all(refs)
    if runs and any(runs[2]):
        return (ref, *map(one_or_all, runs))
    if runs and any(runs[0]):
        return (ref, *map(one_or_all, runs[:2]))
    return (ref,) if isinstance(ref, list) else ref
