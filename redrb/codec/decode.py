"""Decodes groups to samples, or straight into a padded batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from redrb.codec.fill import Stack, stack, table_of
from redrb.codec.layout import GroupLayout, Piece
from redrb.codec.schema import Field
from redrb.codec.table import Table
from redrb.codec.target import Target, bits_of
from redrb.codec.wire import (
    MAX_BATCH_BYTES,
    storage_of,
    tensor_of,
)
from redrb.errors import RecordError
from redrb.experience.batching import assemble_experience
from redrb.experience.padding import (
    MASK_DTYPES,
    MASK_OF,
    Shape,
    check_side,
    lengths_mask,
    pad_value,
    padded_shape,
)
from redrb.experience.records import TENSOR_FIELDS, BufferItem, Experience, Side
from redrb.experience.status import Status

T = TypeVar("T")
Source: TypeAlias = tuple[memoryview, int, Piece]
"""A blob, the wire dtype of a column in it, and where one sample lies in the column."""


def decode_items(layout: GroupLayout) -> list[BufferItem]:
    """Decode one group to samples that own their memory and may be changed.

    Samples of a layout that is decoded twice share the objects nested in `extras`.
    """
    rows: list[dict[str, Tensor]] = [{} for _ in range(layout.samples)]
    blob = memoryview(layout.blob)
    for field, pieces in zip(layout.fields, layout.pieces, strict=True):
        for row, piece in zip(rows, pieces, strict=True):
            if piece is not None:
                array = np.empty(math.prod(piece[0]), field.dtype.storage)
                Target(array, field.dtype).write(blob, field.wire, piece, 0)
                row[field.name] = tensor_of(array.reshape(piece[0]), field.dtype)
    metadata = _metadata([layout], None)
    return [
        BufferItem(
            **{name: row.pop(name, None) for name in TENSOR_FIELDS},  # type: ignore[arg-type]
            tensors=row,
            **dict(zip(metadata, values, strict=True)),
        )
        for row, values in zip(rows, zip(*metadata.values(), strict=True), strict=True)
    ]


def decode_batch(
    layouts: Sequence[GroupLayout], *, side: Side = "left", pin: bool = False
) -> Experience:
    """Decode groups straight into one padded batch, a row for each of their samples.

    The batch equals that of `make_experience_batch` for the same samples, with one copy less.

    Args:
        layouts: At least one group; all with the same fields and dtypes.
        side: Where padding goes, "left" or "right".
        pin: Put the batch into pinned memory, for fast copies to an accelerator; without an
            accelerator this does nothing.

    Raises:
        RecordError: No group, another side, groups that do not fit each other, or a batch that
            would be larger than 4 GiB.
    """
    side = check_side(side)
    if not layouts:
        raise RecordError("a batch needs at least one sample.")
    table = table_of(layouts)
    columns = _columns(layouts) if table is None else _sorted(stack(table, layouts))
    shapes = {name: column.padded_shape() for name, column in columns.items()}
    made = {
        mask: _lengths_to_mark(columns[of].lengths())
        for of, mask in MASK_OF.items()
        if of in columns and mask not in columns
    }
    _check_size(columns, shapes, made)
    pin = pin and torch.accelerator.is_available()
    padded = {name: columns[name].padded(shape, side, pin=pin) for name, shape in shapes.items()}
    for mask, lengths in made.items():
        if lengths:
            padded[mask] = lengths_mask(lengths, max(lengths), side, MASK_DTYPES[mask], pin=pin)
    return assemble_experience(padded, _metadata(layouts, table), side)


def _metadata(layouts: Sequence[GroupLayout], table: Table | None) -> dict[str, list[Any]]:
    """Return each sample's metadata by name; its dicts are copies."""
    if table is not None and table.plain:
        size = table.size
        return {
            "policy_version": [layout.policy_versions[0] for layout in layouts],
            "status": [Status.COMPLETED] * size,
            "group_id": [None] * size,
            "tags": [{} for _ in range(size)],
            "extras": [{} for _ in range(size)],
        }
    return {
        "policy_version": _joined("policy_versions", layouts),
        "status": _joined("statuses", layouts),
        "group_id": [layout.group_id for layout in layouts for _ in range(layout.samples)],
        "tags": list(map(dict, _joined("tags", layouts))),
        "extras": list(map(dict, _joined("extras", layouts))),
    }


def _joined(name: str, layouts: Sequence[GroupLayout]) -> list[Any]:
    return list(chain.from_iterable(map(attrgetter(name), layouts)))


class _Column:
    """One field of a batch of any groups: where the sample of each row lies."""

    def __init__(self, field: Field, rows: int) -> None:
        self.name = field.name
        self.dtype = field.dtype
        self.sources: list[Source | None] = [None] * rows

    def add(
        self, first: int, blob: memoryview, field: Field, pieces: Sequence[Piece | None]
    ) -> None:
        """Add the samples of one group, from row `first` on."""
        if field.dtype is not self.dtype:
            raise RecordError(
                f"{self.name} is {self.dtype.tensor} in some samples and {field.dtype.tensor} in "
                f"sample {first}: a batch needs one dtype a field.",
                field=self.name,
            )
        for row, piece in enumerate(pieces, first):
            if piece is not None:
                self.sources[row] = (blob, field.wire, piece)

    def lengths(self) -> list[int]:
        """Return the first dimension of each row's sample; 0 where it has none."""
        shapes = [source[2][0] if source else () for source in self.sources]
        return [shape[0] if shape else 0 for shape in shapes]

    def padded_shape(self) -> Shape:
        """Return the shape of the padded field; raises RecordError if the rows do not fit."""
        if None in self.sources:
            raise RecordError(
                f"{self.name} is None in sample {self.sources.index(None)} and a tensor in others.",
                field=self.name,
            )
        shapes = [source[2][0] for source in self.sources if source is not None]
        if shapes.count(shapes[0]) == len(shapes):
            return (len(shapes), *shapes[0])
        return padded_shape(self.name, shapes)

    def padded(self, shape: Shape, side: Side, *, pin: bool) -> Tensor:
        """Return the padded field."""
        tensor = torch.empty(shape, dtype=self.dtype.tensor, pin_memory=pin)
        target = Target(storage_of(tensor, self.dtype), self.dtype)
        inner = math.prod(shape[2:])
        stride = math.prod(shape[1:])
        code, size = self.dtype.code or None, self.dtype.itemsize
        filler = bits_of(pad_value(self.name), self.dtype)
        for row, source in enumerate(self.sources):
            if source is None:
                continue
            blob, wire, piece = source
            at, end = row * stride, (row + 1) * stride
            if piece[1] == stride and wire == code:  # a body without runs that fills the row
                target.bytes[at * size : end * size] = blob[piece[6] : piece[7]]
                continue
            held = piece[0][0] * inner if piece[0] else 1
            if held == stride:
                target.write(blob, wire, piece, at)
            elif side == "left":
                target.array[at : end - held] = filler
                target.write(blob, wire, piece, end - held)
            else:
                target.write(blob, wire, piece, at)
                target.array[at + held : end] = filler
        return tensor


def _columns(layouts: Sequence[GroupLayout]) -> dict[str, _Column]:
    """Return the fields that any group has: standard fields first, then by name."""
    found = _find_columns(layouts)
    for of, mask in MASK_OF.items():
        _fill_mask(found.get(mask), found.get(of))
    return _sorted(found)


def _sorted(columns: dict[str, T]) -> dict[str, T]:
    further = sorted(columns.keys() - TENSOR_FIELDS)
    return {name: columns[name] for name in (*TENSOR_FIELDS, *further) if name in columns}


def _find_columns(layouts: Sequence[GroupLayout]) -> dict[str, _Column]:
    """Return the fields that any group has, by name."""
    rows = sum(layout.samples for layout in layouts)
    found: dict[str, _Column] = {}
    first = 0
    for layout in layouts:
        blob = memoryview(layout.blob)
        for field, pieces in zip(layout.fields, layout.pieces, strict=True):
            column = found.get(field.name)
            if column is None:
                column = found[field.name] = _Column(field, rows)
            column.add(first, blob, field, pieces)
        first += layout.samples
    return found


def _fill_mask(mask: _Column | None, described: _Column | None) -> None:
    """Give rows without a mask a mask of ones, if other rows have one."""
    if mask is None or described is None or None not in mask.sources:
        return
    one = bits_of(1, mask.dtype)
    for row, length in enumerate(described.lengths()):
        if mask.sources[row] is None:
            ones: Piece = ((length,), 0, length, one, 0, 0, 0, 0)
            mask.sources[row] = (memoryview(b""), mask.dtype.code, ones)


def _lengths_to_mark(lengths: list[int]) -> list[int]:
    """Return the lengths to make a mask from; empty if they are equal and none is needed."""
    return lengths if len(set(lengths)) > 1 else []


def _check_size(
    columns: Mapping[str, Stack | _Column], shapes: dict[str, Shape], made: dict[str, list[int]]
) -> None:
    size = sum(math.prod(shape) * columns[name].dtype.itemsize for name, shape in shapes.items())
    size += sum(
        len(lengths) * max(lengths) * MASK_DTYPES[mask].itemsize
        for mask, lengths in made.items()
        if lengths
    )
    if size > MAX_BATCH_BYTES:
        raise RecordError(
            f"the padded batch would have {size} bytes, the limit is {MAX_BATCH_BYTES}: "
            "take fewer groups at a time."
        )
