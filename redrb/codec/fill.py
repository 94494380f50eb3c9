"""Decodes the columns of a table to padded tensors, a row for each group, with few calls a row."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from redrb.codec.layout import GroupLayout
from redrb.codec.table import Numbers, Table, TableColumn
from redrb.codec.target import Target, bits_of
from redrb.codec.wire import BOOL, DTYPES, UINT64, Storage, storage_of, tensor_of
from redrb.experience.padding import Shape, pad_value, padded_shape
from redrb.experience.records import Side


class Stack:
    """One field of a batch whose rows are the groups of a table."""

    def __init__(self, column: TableColumn, blobs: Sequence[memoryview]) -> None:
        self.name = column.field.name
        self.dtype = column.field.dtype
        self._column = column
        self._blobs = blobs

    def padded_shape(self) -> Shape:
        """Return the shape of the padded field; raises RecordError if the rows do not fit."""
        if self._column.shape is not None:
            return (len(self._blobs), *self._column.shape)
        return padded_shape(self.name, self._column.shapes)

    def lengths(self) -> list[int]:
        """Return the first dimension of each row's sample; 0 where it has none."""
        return [shape[0] if shape else 0 for shape in self._column.shapes]

    def padded(self, shape: Shape, side: Side, *, pin: bool) -> Tensor:
        """Return the padded field."""
        if not pin and self._is_whole():
            return self._joined(shape)
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
                firsts = [at + stride - length for at, length in zip(firsts, held, strict=True)]
        background = self._write_bodies(array, firsts, pad)
        if self._column.leads is not None:
            self._write_runs(array, firsts, self._column.leads, background)
        return tensor

    def _is_whole(self) -> bool:
        """Return whether each row is a body without runs, padding or conversion."""
        column = self._column
        as_it_is = column.field.wire == self.dtype.code != BOOL
        return as_it_is and column.leads is None and column.shape is not None

    def _joined(self, shape: Shape) -> Tensor:
        """Return the field whose memory is the joined bodies."""
        column = self._column
        bodies = [
            blob[start:end]
            for blob, start, end in zip(self._blobs, column.starts, column.ends, strict=True)
        ]
        array = np.frombuffer(bytearray().join(bodies), self.dtype.storage)
        return tensor_of(array.reshape(shape), self.dtype)

    def _memory(self, shape: Shape, *, pin: bool) -> tuple[Tensor, Storage]:
        """Return a new tensor and its elements."""
        if pin:
            tensor = torch.empty(shape, dtype=self.dtype.tensor, pin_memory=True)
            return tensor, storage_of(tensor, self.dtype)
        array = np.empty(shape, self.dtype.storage)  # several times as fast as torch.empty
        return tensor_of(array, self.dtype), array.reshape(-1)

    def _write_bodies(self, array: Storage, firsts: Sequence[int], pad: int | None) -> int | None:
        """Write bodies and padding; return the value where runs belong, None if it is unknown."""
        column = self._column
        code, wire = self.dtype.code, column.field.wire
        if wire == BOOL or not any(column.counts):
            background = pad if pad is not None else self._commonest()
            array.fill(background)
            self._convert(array, firsts)
            return background
        if wire != code and code <= UINT64 and not pad:
            stored = np.zeros(array.size, DTYPES[wire].storage)
            self._copy(stored, firsts)
            array[:] = stored
            return 0
        if pad is not None:
            array.fill(pad)
        if wire == code:
            self._copy(array, firsts)
        else:
            self._convert(array, firsts)
        return pad

    def _commonest(self) -> int:
        """Return a value that is likely to be the most frequent one."""
        column = self._column
        return column.trail_values[0] if column.trails[0] else column.lead_values[0]

    def _convert(self, array: Storage, firsts: Sequence[int]) -> None:
        """Decode bodies row by row; the sample of each row begins at its element of `firsts`."""
        column, target = self._column, Target(array, self.dtype)
        leads = column.leads or (0,) * len(firsts)
        for row, count in enumerate(column.counts):
            if count:
                body = self._blobs[row][column.starts[row] : column.ends[row]]
                target.convert(body, column.field.wire, firsts[row] + leads[row], count)

    def _copy(self, array: Storage, firsts: Sequence[int]) -> None:
        """Copy bodies that are stored as the dtype of `array`; samples begin at `firsts`."""
        column, size = self._column, array.itemsize
        room = array.view(np.uint8).data
        leads = column.leads or (0,) * len(firsts)
        places = [(at + lead) * size for at, lead in zip(firsts, leads, strict=True)]
        for blob, start, end, at in zip(
            self._blobs, column.starts, column.ends, places, strict=True
        ):
            room[at : at + end - start] = blob[start:end]

    def _write_runs(
        self, array: Storage, firsts: Sequence[int], leads: Sequence[int], background: int | None
    ) -> None:
        """Write the runs whose value differs from the background."""
        column = self._column
        _write_runs(array, firsts, leads, column.lead_values, background)
        if any(column.trails):
            ends = zip(firsts, column.totals, column.trails, strict=True)
            starts = [at + total - trail for at, total, trail in ends]
            _write_runs(array, starts, column.trails, column.trail_values, background)


def _write_runs(
    array: Storage, starts: Numbers, lengths: Numbers, values: Numbers, background: int | None
) -> None:
    if values.count(background) == len(values):
        return
    if values.count(values[0]) < len(values):
        for at, length, value in zip(starts, lengths, values, strict=True):
            if length and value != background:
                array[at : at + length] = value
        return
    room, size = array.view(np.uint8).data, array.itemsize
    run = np.full(max(lengths), values[0], array.dtype).view(np.uint8).data
    for at, length in zip(starts, lengths, strict=True):
        room[at * size : (at + length) * size] = run[: length * size]


def table_of(layouts: Sequence[GroupLayout]) -> Table | None:
    """Return the table whose groups these are, all and in order; None if there is none."""
    table = layouts[0].rows
    if not isinstance(table, Table) or len(layouts) != table.size:
        return None
    for row, layout in enumerate(layouts):
        if layout.rows is not table or layout.row != row:
            return None
    return table


def stack(table: Table, layouts: Sequence[GroupLayout]) -> dict[str, Stack]:
    """Return the fields of the batch of a table's groups, by name."""
    blobs = [
        layout.blob if type(layout.blob) is memoryview else memoryview(layout.blob)
        for layout in layouts
    ]
    return {column.field.name: Stack(column, blobs) for column in table.columns}
