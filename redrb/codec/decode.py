"""Bytes to samples, or to a padded batch with one copy of each byte."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from redrb.codec import kernels
from redrb.codec.dtypes import DTYPES, DType
from redrb.codec.kernels import NOWHERE, Group
from redrb.codec.layout import GroupLayout
from redrb.codec.wire import batch_limit
from redrb.errors import ConfigError, RecordError
from redrb.experience.batching import assemble_experience
from redrb.experience.padding import (
    MARKED,
    MASK_DTYPES,
    Shape,
    check_side,
    lengths_mask,
    pad_value,
    padded_shape,
    row_slice,
    with_masks,
)
from redrb.experience.records import TENSOR_FIELDS, BufferItem, Experience, Side

THREADED_BYTES = 16 << 20
"""Columns of at least this size are decoded by several threads."""


def decode_items(layout: GroupLayout) -> list[BufferItem]:
    """Decode one group to samples that own their memory and may be changed.

    Decoding the same layout twice shares what is nested in `extras`.
    """
    rows: list[dict[str, Tensor]] = [{} for _ in range(layout.samples)]
    for column, field in enumerate(layout.fields):
        for row, shape in enumerate(layout.shapes(column)):
            if shape is not None:
                tensor = torch.empty(shape, dtype=field.dtype.tensor)
                layout.group.read(column, row, tensor.data_ptr(), tensor.nbytes)
                rows[row][field.name] = tensor
    metadata = _metadata([layout])
    return [
        BufferItem(
            **{name: row.pop(name, None) for name in TENSOR_FIELDS},  # type: ignore[arg-type]
            tensors=row,
            **dict(zip(metadata, values, strict=True)),
        )
        for row, values in zip(rows, zip(*metadata.values(), strict=True), strict=True)
    ]


def decode_batch(
    layouts: Sequence[GroupLayout],
    *,
    side: Side = "left",
    pin: bool = False,
    names: Collection[str] | None = None,
) -> Experience:
    """Decode groups straight into one padded batch, a row for each of their samples.

    The batch is what `make_experience_batch` makes of all their samples, with one copy less.

    Args:
        layouts: At least one group; all with the same fields and dtypes.
        side: Where padding goes, "left" or "right".
        pin: Put the batch into pinned memory, for fast copies to an accelerator; without an
            accelerator this does nothing.
        names: Tensors of the batch, to which their masks are added; others are not decoded. None:
            all.

    Raises:
        ConfigError: No group has a tensor of `names`.
        RecordError: No group, another side, groups that do not fit each other, or a batch that
            would be larger than `batch_limit` allows.
    """
    side = check_side(side)
    if not layouts:
        raise RecordError("a batch needs at least one sample.")
    wanted = None if names is None else with_masks(names)
    every = _columns(layouts, wanted)
    columns = {name: every[name] for name in every if wanted is None or name in wanted}
    shapes = {name: column.padded_shape(every) for name, column in columns.items()}
    size = sum(math.prod(shape) * columns[name].dtype.itemsize for name, shape in shapes.items())
    made = []
    for mask, marked in MARKED.items():
        described = next((name for name in marked if len(shapes.get(name, ())) > 1), "")
        if described and mask not in columns:
            rows, longest, *_ = shapes[described]
            made.append((mask, columns[described], longest))
            size += rows * longest * MASK_DTYPES[mask].itemsize
    lacking = set(names or ()).difference(columns, (mask for mask, *_ in made))
    if lacking:
        raise ConfigError(
            f"no group of this batch has {', '.join(sorted(lacking))}. "
            f"They have {', '.join(every)}."
        )
    limit = batch_limit(sum(layout.nbytes for layout in layouts))
    if size > limit:
        raise RecordError(
            f"the padded batch would have {size} bytes, the limit for these groups is {limit}: "
            "take fewer groups at a time, of samples that differ less in length."
        )
    pin = pin and torch.accelerator.is_available()
    padded = {name: columns[name].padded(shape, side, pin=pin) for name, shape in shapes.items()}
    for mask, column, longest in made:
        padded[mask] = column.mask(longest, side, MASK_DTYPES[mask], pin=pin)
    ragged = {name: columns[name].lengths() for name in _ragged(columns, shapes)}
    batch = assemble_experience(padded, _metadata(layouts), side, ragged)
    sizes = [layout.samples for layout in layouts]
    batch.group_index = torch.from_numpy(np.repeat(np.arange(len(sizes), dtype=np.int64), sizes))
    return batch


def _ragged(columns: Mapping[str, _Column], shapes: Mapping[str, Shape]) -> set[str]:
    """Return the fields whose lengths `assemble_experience` takes."""
    further = [name for name in columns if name not in TENSOR_FIELDS]
    found = {name for name in further if not columns[name].alike}
    near = [name for name in further if shapes[name] == shapes.get("sequences")]
    if near and not (columns["sequences"].alike and found.isdisjoint(near)):
        found.update(near, ("sequences",))
    return found


def _metadata(layouts: Sequence[GroupLayout]) -> dict[str, list[Any]]:
    """Return each sample's metadata by name; no two samples share a dict."""
    return {
        "policy_version": _joined("policy_versions", layouts),
        "status": _joined("statuses", layouts),
        "group_id": [layout.group_id for layout in layouts for _ in range(layout.samples)],
        "tags": list(map(dict, _joined("tags", layouts))),
        "extras": list(map(dict, _joined("extras", layouts))),
    }


def _joined(name: str, layouts: Sequence[GroupLayout]) -> list[Any]:
    return list(chain.from_iterable(map(attrgetter(name), layouts)))


@dataclass(slots=True)
class _Column:
    """One field of many groups."""

    name: str
    dtype: DType
    groups: tuple[Group, ...]
    rows: int  # samples in all groups
    places: bytes  # of the field among the columns of each group; NOWHERE where one lacks it
    ones: dict[int, int] | None = None  # of a mask that some rows lack: ones that stand for it
    alike: bool = False  # whether all rows have one shape; known after `padded_shape`
    longest: int = 0  # the first dimension of rows that are alike

    def lengths(self) -> list[int]:
        """Return the first dimension of each row's sample; 0 where it has none."""
        if self.alike:
            return [self.longest] * self.rows
        return [shape[0] if shape else 0 for shape in self.shapes()]

    def mask(self, longest: int, side: Side, dtype: torch.dtype, *, pin: bool) -> Tensor:
        """Return the mask of the rows' entries among `longest`."""
        if self.alike:
            return torch.ones(self.rows, longest, dtype=dtype, pin_memory=pin)
        return lengths_mask(self.lengths(), longest, side, dtype, pin=pin)

    def shapes(self) -> list[Shape | None]:
        """Return the shape of each row's sample; None where it has none."""
        shapes: list[Shape | None] = []
        for group, place in zip(self.groups, self.places, strict=True):
            if place == NOWHERE:
                shapes += [None] * group.samples
            else:
                shapes += [piece and piece[0] for piece in group.pieces(place)]
        return shapes

    def padded_shape(self, columns: Mapping[str, _Column]) -> Shape:
        """Return the shape of the padded field, or raise RecordError where rows do not fit."""
        extent = kernels.kernel.extent(self.groups, self.places)
        if extent is None:
            return self._uneven_shape(columns)
        first, longest, self.alike = extent
        self.longest = longest
        return (self.rows, *first) if self.alike else (self.rows, longest, *first[1:])

    def _uneven_shape(self, columns: Mapping[str, _Column]) -> Shape:
        """Do the same row by row, where some lack the field or differ in rank."""
        shapes = self.shapes()
        missing = [row for row, shape in enumerate(shapes) if shape is None]
        if missing:
            marked = [
                columns[name].shapes() for name in MARKED.get(self.name, ()) if name in columns
            ]
            lengths = next(([each[0] for each in of if each] for of in marked if all(of)), None)
            if lengths is None:
                raise RecordError(
                    f"{self.name} is None in sample {missing[0]} and a tensor in others.",
                    field=self.name,
                )
            self.ones = {row: lengths[row] for row in missing}
        ones = self.ones or {}
        filled = [(ones[row],) if shape is None else shape for row, shape in enumerate(shapes)]
        return padded_shape(self.name, filled)

    def padded(self, shape: Shape, side: Side, *, pin: bool) -> Tensor:
        """Return the field, each row's sample decoded to its place."""
        tensor = torch.empty(shape, dtype=self.dtype.tensor, pin_memory=pin)
        if tensor.nbytes < THREADED_BYTES or len(self.groups) == 1:
            self._fill(tensor, side, 0, len(self.groups))
        else:
            tasks = _pool()
            jobs = [
                tasks.submit(self._fill, tensor[first:last], side, begin, end)
                for first, last, begin, end in _shares(self.groups)
            ]
            for job in jobs:
                job.result()
        for row, count in (self.ones or {}).items():
            tensor[row, row_slice(count, shape[1], side)] = 1
        return tensor

    def _fill(self, rows: Tensor, side: Side, begin: int, end: int) -> None:
        """Decode some of the groups into their rows."""
        kernels.kernel.fill(
            self.groups[begin:end],
            self.places[begin:end],
            rows.data_ptr(),
            rows.nbytes,
            self.dtype.code,
            math.prod(rows.shape[1:]),
            side == "left",
            _bits_of(pad_value(self.name), self.dtype.code),
        )


@cache
def _pool() -> ThreadPoolExecutor:
    """Return the threads that decode large columns; they end with the process."""
    return ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="redrb-decode")


def _shares(groups: Sequence[Group]) -> Iterable[tuple[int, int, int, int]]:
    """Yield the first and last row, and the first and last group, of each thread's share."""
    share = -(-len(groups) // min(8, os.cpu_count() or 1))
    row = 0
    for begin in range(0, len(groups), share):
        end = min(begin + share, len(groups))
        last = row + sum(group.samples for group in groups[begin:end])
        yield row, last, begin, end
        row = last


@cache
def _bits_of(value: int, code: int) -> int:
    """Return the bit pattern of `value` in this dtype."""
    dtype = DTYPES[code]
    bits = torch.full((1,), value, dtype=dtype.tensor).view(torch.uint8).numpy()
    return int(bits.view(dtype.unsigned)[0])


def _columns(layouts: Sequence[GroupLayout], wanted: frozenset[str] | None) -> dict[str, _Column]:
    """Return the fields that any group has: the standard ones first, then by name.

    Args:
        wanted: Names of those that must have one dtype; None: all.
    """
    groups = tuple(layout.group for layout in layouts)
    rows = sum(layout.samples for layout in layouts)
    found: dict[str, _Column] = {}
    row = 0
    fields = layouts[0].fields
    if all(layout.fields is fields for layout in layouts):
        for index, field in enumerate(fields):
            found[field.name] = _Column(
                field.name, field.dtype, groups, rows, bytes([index]) * len(groups)
            )
        return _sorted(found)
    dtypes: dict[str, DType] = {}
    known: dict[str, bytearray] = {}
    for place, layout in enumerate(layouts):
        for index, field in enumerate(layout.fields):
            dtype = dtypes.setdefault(field.name, field.dtype)
            if field.dtype is not dtype and (wanted is None or field.name in wanted):
                raise RecordError(
                    f"{field.name} is {dtype.tensor} in some samples and "
                    f"{field.dtype.tensor} in sample {row}: a batch needs one dtype a field.",
                    field=field.name,
                )
            known.setdefault(field.name, bytearray([NOWHERE]) * len(groups))[place] = index
        row += layout.samples
    for name, dtype in dtypes.items():
        found[name] = _Column(name, dtype, groups, rows, bytes(known[name]))
    return _sorted(found)


def _sorted(columns: dict[str, _Column]) -> dict[str, _Column]:
    further = sorted(columns.keys() - TENSOR_FIELDS)
    return {name: columns[name] for name in (*TENSOR_FIELDS, *further) if name in columns}
