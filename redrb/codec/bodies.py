"""Bodies of the columns of any groups: without runs, in the narrowest dtype that loses nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from redrb.codec.columns import Column, Grouping, Places
from redrb.codec.runs import Runs, find_runs
from redrb.codec.wire import (
    BFLOAT16,
    BOOL,
    DTYPES,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    INT8,
    INT64,
    UINT8,
    UINT64,
    Storage,
    storage_of,
)

Part: TypeAlias = bytes | memoryview

_SIGNED_MAXIMA = np.array([2**7 - 1, 2**15 - 1, 2**31 - 1])
_UNSIGNED_MAXIMA = np.array([1, 2**8 - 1, 2**16 - 1, 2**32 - 1], np.uint64)
_SIGNED = np.array([INT8, INT8 + 1, INT8 + 2, INT64])
_UNSIGNED = np.array([BOOL, UINT8, UINT8 + 1, UINT8 + 2, UINT64])
_SIZES = np.array([dtype.itemsize for dtype in DTYPES])
_BITS = np.array([1 if dtype.code == BOOL else 8 * dtype.itemsize for dtype in DTYPES])


@dataclass(slots=True)
class EncodedColumn:
    """One field, ready for the wire.

    Attributes:
        wires: Dtype code of each group's body.
        runs: The runs that were cut off the samples; None if no sample has any.
        bodies: The parts of each group's body.
        nbytes: Bytes of each group's body.
    """

    wires: list[int]
    runs: Runs | None
    bodies: list[Sequence[Part]]
    nbytes: Places


def encode_column(column: Column, grouping: Grouping, narrow: int | None) -> EncodedColumn:
    """Encode one field: cut runs off, choose each group's narrowest wire dtype, slice the bodies.

    Args:
        column: At least one sample.
        grouping: How its samples form groups.
        narrow: Code of the dtype that float32 and float64 are stored as; None keeps them.
    """
    begins, counts = column.spans.starts, column.spans.counts
    runs = find_runs(column.flat, column.spans)
    is_float = column.dtype.code > UINT64
    if runs is not None:
        leads, _, trails, _ = runs
        begins, counts = begins + leads, counts - leads - trails
    cut = Cut(column, begins, counts, grouping)
    wires = cut.float_wires(narrow) if is_float else cut.integer_wires()
    return EncodedColumn(wires.tolist(), runs, cut.bodies(wires), cut.nbytes(wires))


@dataclass(slots=True)
class Cut:
    """A column without its runs: each sample keeps `counts` elements from `begins` on."""

    column: Column
    begins: Places
    counts: Places
    grouping: Grouping

    def integer_wires(self) -> Places:
        """Return each group's narrowest dtype that loses nothing."""
        dtype = self.column.dtype
        rows = np.flatnonzero(self.counts)
        if dtype.code == BOOL or rows.size == 0:
            return np.full(len(self.grouping.counts), BOOL)
        edges = np.empty(2 * len(rows), np.int64)
        edges[::2] = self.begins[rows]
        edges[1::2] = edges[::2] + self.counts[rows]
        if edges[-1] == self.column.flat.size:
            edges = edges[:-1]
        high = self._extreme(np.maximum, dtype.unsigned, rows, edges)
        wires = _UNSIGNED[np.searchsorted(_UNSIGNED_MAXIMA, high)]
        if int(high.max()) > dtype.high:  # a negative value is huge when it is read as unsigned
            wires = self._signed_wires(wires, rows, edges)
        wide = (wires != BOOL) & (_SIZES[wires] >= dtype.itemsize)
        return np.where(wide, dtype.code, wires)

    def _signed_wires(self, wires: Places, rows: Places, edges: Places) -> Places:
        """Return the dtypes, signed for groups whose bodies have negative values."""
        storage = self.column.dtype.storage
        low = self._extreme(np.minimum, storage, rows, edges).astype(np.int64)
        high = self._extreme(np.maximum, storage, rows, edges).astype(np.int64)
        signed = _SIGNED[np.searchsorted(_SIGNED_MAXIMA, np.maximum(high, -1 - low))]
        return np.where(low < 0, signed, wires)

    def _extreme(
        self, ufunc: np.ufunc, storage: np.dtype[Any], rows: Places, edges: Places
    ) -> Storage:
        """Return the largest or smallest of 0 and each group's elements.

        Args:
            ufunc: `np.maximum` or `np.minimum`.
            storage: Integer dtype to compare elements as.
            rows: Samples that have elements left.
            edges: Begin and end of each of these, alternating.
        """
        out = np.zeros(len(self.counts), storage)
        out[rows] = ufunc.reduceat(self.column.flat.view(storage), edges)[::2]
        if self.grouping.alone:
            return out
        return np.asarray(ufunc.reduceat(out, self.grouping.firsts))

    def float_wires(self, narrow: int | None) -> Places:
        """Return `narrow` for each group whose values all fit, and the column's dtype otherwise."""
        code = self.column.dtype.code
        wires = np.full(len(self.grouping.counts), code)
        if narrow is None or code not in (FLOAT32, FLOAT64):
            return wires
        lost = self._as_wire(narrow).isinf() & ~self.column.tensor.isinf()
        if not bool(lost.any()):
            return np.full_like(wires, narrow)
        places = lost.nonzero()[:, 0].numpy()
        rows = np.searchsorted(self.column.spans.starts, places, side="right") - 1
        groups = np.searchsorted(self.grouping.firsts, rows, side="right") - 1
        fits = np.ones(len(wires), dtype=bool)
        fits[groups] = False
        return np.where(fits, narrow, wires)

    def _as_wire(self, wire: int) -> Tensor:
        return self.column.tensor.to(torch.float16 if wire == FLOAT16 else torch.bfloat16)

    def nbytes(self, wires: Places) -> Places:
        """Return the bytes of each group's body."""
        each = wires if self.grouping.alone else np.repeat(wires, self.grouping.counts)
        sizes = np.asarray((self.counts * _BITS[each] + 7) >> 3)
        if self.grouping.alone:
            return sizes
        return np.asarray(np.add.reduceat(sizes, self.grouping.firsts))

    def bodies(self, wires: Places) -> list[Sequence[Part]]:
        """Return the parts of each group's body: slices of one array for each wire dtype."""
        kinds = wires.tolist()
        views = {wire: self._wire_view(wire) for wire in set(kinds) if wire != BOOL}
        begins, ends = self.begins.tolist(), (self.begins + self.counts).tolist()
        if not views and not self.counts.any():
            return [()] * len(kinds)
        if self.grouping.alone and BOOL not in kinds and len(views) == 1:
            ((view, size),) = views.values()
            return [
                (view[begin * size : end * size],) for begin, end in zip(begins, ends, strict=True)
            ]
        if self.grouping.alone:
            spans = zip(kinds, begins, ends, strict=True)
            return [self._body(views, *span) if span[1] < span[2] else () for span in spans]
        bodies: list[Sequence[Part]] = []
        row = 0
        for wire, count in zip(kinds, self.grouping.counts.tolist(), strict=True):
            joined = _joined(begins[row : row + count], ends[row : row + count], wire)
            row += count
            bodies.append([part for span in joined for part in self._body(views, wire, *span)])
        return bodies

    def _body(
        self, views: dict[int, tuple[memoryview, int]], wire: int, begin: int, end: int
    ) -> Sequence[Part]:
        if wire == BOOL:
            return (np.packbits(self.column.flat[begin:end], bitorder="little").data,)
        view, size = views[wire]
        return (view[begin * size : end * size],)

    def _wire_view(self, wire: int) -> tuple[memoryview, int]:
        """Return all samples as one wire dtype, and the bytes of one element."""
        dtype = DTYPES[wire]
        if wire in (FLOAT16, BFLOAT16) and wire != self.column.dtype.code:
            array = storage_of(self._as_wire(wire), dtype)
        else:
            array = self.column.flat.astype(dtype.storage, copy=False)
        return array.view(np.uint8).data, dtype.itemsize


def _joined(begins: list[int], ends: list[int], wire: int) -> list[tuple[int, int]]:
    """Return the spans that are not empty; adjacent ones are merged, except of bits."""
    spans: list[tuple[int, int]] = []
    for begin, end in zip(begins, ends, strict=True):
        if begin == end:
            continue
        if spans and spans[-1][1] == begin and wire != BOOL:
            spans[-1] = (spans[-1][0], end)
        else:
            spans.append((begin, end))
    return spans
