"""A table's columns to padded tensors, a row a group: few calls a row, each as cheap as can be."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from redrb.codec.layout import GroupLayout
from redrb.codec.table import Table, TableColumn
from redrb.codec.target import Target, bits_of
from redrb.codec.wire import BOOL, DTYPES, UINT64, Storage, storage_of, tensor_of
from redrb.experience.padding import Shape, pad_value, padded_shape
from redrb.experience.records import Side


class Stack:
    """One field of a batch whose rows are those of a table."""

    def __init__(self, column: TableColumn, blobs: Sequence[memoryview]) -> None:
        self.name = column.field.name
        self.dtype = column.field.dtype
        self._column = column
        self._blobs = blobs

    def padded_shape(self) -> Shape:
        """Return the shape of the padded field, or raise RecordError where rows do not fit."""
        if self._column.shape is not None:
            return (len(self._blobs), *self._column.shape)
        return padded_shape(self.name, self._column.shapes)

    def lengths(self) -> list[int]:
        """Return the first dimension of each row's sample; 0 where it has none."""
        return [shape[0] if shape else 0 for shape in self._column.shapes]

    def padded(self, shape: Shape, side: Side, *, pin: bool) -> Tensor:
        """Return the field, each row's sample decoded to its place."""
        stride = math.prod(shape[1:])
        tensor, array = self._memory(shape, pin=pin)
        if not stride:
            return tensor
        firsts: Sequence[int] = range(0, len(array), stride)
        pad: int | None = None
        if self._column.shape is None:
            pad = bits_of(pad_value(self.name), self.dtype)
            if side == "left":
                held = self._column.totals
                firsts = [at + stride - own for at, own in zip(firsts, held, strict=True)]
        background = self._write_bodies(array, firsts, pad)
        if self._column.leads is not None:
            self._write_runs(array, firsts, self._column.leads, background)
        return tensor

    def _memory(self, shape: Shape, *, pin: bool) -> tuple[Tensor, Storage]:
        """Return a new tensor and its elements."""
        if pin:
            tensor = torch.empty(shape, dtype=self.dtype.tensor, pin_memory=True)
            return tensor, storage_of(tensor, self.dtype)
        array = np.empty(shape, self.dtype.storage)  # several times as quick to make as a tensor
        return tensor_of(array, self.dtype), array.reshape(-1)

    def _write_bodies(self, array: Storage, firsts: Sequence[int], pad: int | None) -> int | None:
        """Write all bodies, and the padding; return what lies in the runs' places, if known."""
        own = self._column
        code, wire = self.dtype.code, own.field.wire
        if not any(own.counts):
            background = self._commonest() if pad is None else pad
            array.fill(background)
            return background
        begins = firsts
        if own.leads is not None:
            begins = [at + lead for at, lead in zip(firsts, own.leads, strict=True)]
        if wire not in (BOOL, code) and code <= UINT64 and not pad:
            stored = np.zeros(array.size, DTYPES[wire].storage)
            self._copy(stored, begins)
            array[:] = stored
            return 0
        if pad is not None:
            array.fill(pad)
        if wire == code and wire != BOOL:
            self._copy(array, begins)
        else:
            target = Target(array, self.dtype)
            bodies = zip(self._blobs, own.starts, own.ends, begins, own.counts, strict=True)
            for blob, start, end, at, count in bodies:
                if count:
                    target.convert(blob[start:end], wire, at, count)
        return pad

    def _commonest(self) -> int:
        """Return a value that most of the runs may have."""
        own = self._column
        return own.trail_values[0] if own.trails[0] else own.lead_values[0]

    def _copy(self, array: Storage, begins: Sequence[int]) -> None:
        """Copy all bodies, stored as `array`'s dtype, to the elements from `begins` on."""
        own, size = self._column, array.itemsize
        room = array.view(np.uint8).data
        if isinstance(begins, range):
            places: Sequence[int] = range(0, begins.stop * size, begins.step * size)
        else:
            places = [begin * size for begin in begins]
        for blob, start, end, at in zip(self._blobs, own.starts, own.ends, places, strict=True):
            room[at : at + end - start] = blob[start:end]

    def _write_runs(
        self, array: Storage, firsts: Sequence[int], leads: Sequence[int], background: int | None
    ) -> None:
        """Write the runs whose value is not there already."""
        own, there = self._column, {background}
        if not there.issuperset(own.lead_values):
            for at, lead, value in zip(firsts, leads, own.lead_values, strict=True):
                if lead and value != background:
                    array[at : at + lead] = value
        if any(own.trails) and not there.issuperset(own.trail_values):
            ends = [at + total for at, total in zip(firsts, own.totals, strict=True)]
            for end, trail, value in zip(ends, own.trails, own.trail_values, strict=True):
                if trail and value != background:
                    array[end - trail : end] = value


def stacks(layouts: Sequence[GroupLayout]) -> list[Stack] | None:
    """Return the fields of groups that are a whole table in its order; None for any others."""
    table = layouts[0].rows
    if not isinstance(table, Table) or len(layouts) != table.size:
        return None
    for row, own in enumerate(layouts):
        if own.rows is not table or own.row != row:
            return None
    blobs = [memoryview(own.blob) for own in layouts]
    return [Stack(column, blobs) for column in table.columns]
