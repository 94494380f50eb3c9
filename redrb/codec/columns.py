"""One field of all samples of a call, encoded at once.

The work is done on one flat array over all groups: numpy's cost is a call's, hardly a sample's.
What a group's column becomes depends on that group alone, never on its neighbours in the call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from redrb.codec.wire import (
    BFLOAT16,
    BOOL,
    DTYPES,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    INT8,
    INT64,
    MIN_RUN,
    UINT8,
    UINT64,
    DType,
    Storage,
    storage_of,
)
from redrb.experience.padding import Shape

Places: TypeAlias = NDArray[np.int64]
Run: TypeAlias = tuple[int, int, int, int]
"""Length and value of the run at the start, then of the run at the end."""

NO_RUN: Run = (0, 0, 0, 0)
_SIGNED_MAXIMA = np.array([2**7 - 1, 2**15 - 1, 2**31 - 1])
_UNSIGNED_MAXIMA = np.array([1, 2**8 - 1, 2**16 - 1, 2**32 - 1])
_SIGNED = np.array([INT8, INT8 + 1, INT8 + 2, INT64])
_UNSIGNED = np.array([BOOL, UINT8, UINT8 + 1, UINT8 + 2, UINT64])
_SIZES = np.array([dtype.itemsize for dtype in DTYPES])


@dataclass(slots=True)
class Grouping:
    """Which samples of a call belong together.

    Attributes:
        firsts: Index of each group's first sample.
        counts: Samples of each group, each >= 1.
        alone: Whether every group is one sample.
    """

    firsts: Places
    counts: Places
    alone: bool

    @classmethod
    def of(cls, counts: Sequence[int]) -> Grouping:
        """Return the grouping of samples that follow one another."""
        sizes = np.array(counts, dtype=np.int64)
        return cls(np.cumsum(sizes) - sizes, sizes, len(counts) == int(sizes.sum()))


@dataclass
class Column:
    """One field's values, all samples one after another.

    Attributes:
        name: The field.
        dtype: The dtype of all its tensors.
        tensor: The elements of all samples, flat, contiguous, on the CPU.
        shapes: Shape of each sample; None where the sample has none.
        shape: The one shape of all samples, or None where they differ.
    """

    name: str
    dtype: DType
    tensor: Tensor
    shapes: Sequence[Shape | None]
    shape: Shape | None

    @cached_property
    def flat(self) -> Storage:
        """The elements as integers; any true bool as 1."""
        array = storage_of(self.tensor, self.dtype)
        return (array != 0).view(np.uint8) if self.dtype.code == BOOL else array

    @cached_property
    def lengths(self) -> Places:
        """Elements of each sample."""
        if self.shape is not None:
            return np.full(len(self.shapes), _elements(self.shape), dtype=np.int64)
        return np.array([0 if shape is None else _elements(shape) for shape in self.shapes])

    @cached_property
    def starts(self) -> Places:
        """Where each sample begins in `flat`."""
        return np.cumsum(self.lengths) - self.lengths


@dataclass(slots=True)
class EncodedColumn:
    """One field, ready for the wire.

    Attributes:
        wires: Dtype code of each group's body.
        runs: What was taken off each sample, or None where that is nothing anywhere.
        bodies: Each group's body in parts.
        nbytes: Bytes of each group's body.
    """

    wires: list[int]
    runs: list[Run] | None
    bodies: list[Sequence[bytes | memoryview]]
    nbytes: Places


def encode_column(column: Column, grouping: Grouping, narrow: int | None) -> EncodedColumn:
    """Take runs off, choose each group's narrowest wire dtype and cut the bodies out.

    Args:
        column: At least one sample.
        grouping: How its samples form groups.
        narrow: Code of the float dtype that wider floats are stored as; None keeps their bits.
    """
    runs = _find_runs(column.flat, column.starts, column.lengths)
    begins, counts = column.starts, column.lengths
    if runs is not None:
        leads = np.array([run[0] for run in runs])
        begins, counts = begins + leads, counts - leads - np.array([run[2] for run in runs])
    cut = _Cut(column, begins, counts, grouping)
    is_float = column.dtype.code > UINT64
    wires = cut.float_wires(narrow) if is_float else cut.integer_wires()
    bodies = cut.bodies(wires)
    return EncodedColumn(wires.tolist(), runs, bodies, cut.nbytes(wires))


def _elements(shape: Shape) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _find_runs(flat: Storage, starts: Places, lengths: Places) -> list[Run] | None:
    """Return the runs of one value at each sample's start and end, where they are worth it."""
    rows = np.flatnonzero(lengths >= MIN_RUN)
    first = starts[rows]
    last = first + lengths[rows] - 1
    likely = flat[first] == flat[first + (MIN_RUN - 1)]
    likely |= flat[last] == flat[last - (MIN_RUN - 1)]
    if not likely.any():
        return None
    rows, first, last = rows[likely], first[likely], last[likely]
    changes = (flat[1:] != flat[:-1]).tobytes()
    values = zip(flat[first].tolist(), flat[last].tolist(), strict=True)
    found = [NO_RUN] * len(lengths)
    for row, begin, end, (lead_value, trail_value) in zip(
        rows.tolist(), first.tolist(), last.tolist(), values, strict=True
    ):
        change = changes.find(1, begin, end)
        if change < 0:
            found[row] = (end + 1 - begin, lead_value, 0, 0)
            continue
        lead, trail = change + 1 - begin, end - changes.rfind(1, begin, end)
        lead_kept, trail_kept = lead >= MIN_RUN, trail >= MIN_RUN
        found[row] = (
            *((lead, lead_value) if lead_kept else (0, 0)),
            *((trail, trail_value) if trail_kept else (0, 0)),
        )
    return found


@dataclass(slots=True)
class _Cut:
    """A column without its runs: `counts` elements from `begins` on remain of each sample."""

    column: Column
    begins: Places
    counts: Places
    grouping: Grouping

    def integer_wires(self) -> Places:
        """Return each group's narrowest dtype that loses nothing."""
        dtype = self.column.dtype
        if dtype.code == BOOL:
            return np.full(len(self.grouping.counts), BOOL)
        high = self._extreme(np.maximum)
        maxima = _UNSIGNED_MAXIMA.astype(high.dtype)
        wires = _UNSIGNED[np.searchsorted(maxima, high)]
        if dtype.low < 0:
            low = self._extreme(np.minimum)
            signed = _SIGNED[np.searchsorted(_SIGNED_MAXIMA, np.maximum(high, -1 - low))]
            wires = np.where(low < 0, signed, wires)
        wide = (wires != BOOL) & (_SIZES[wires] >= dtype.itemsize)
        return np.where(wide, dtype.code, wires)

    def _extreme(self, ufunc: np.ufunc) -> Places:
        """Return the extreme value of each group's body, no smaller or greater than 0."""
        flat = self.column.flat
        out = np.zeros(len(self.counts), np.uint64 if flat.dtype == np.uint64 else np.int64)
        rows = np.flatnonzero(self.counts)
        if rows.size:
            ends = self.begins[rows] + self.counts[rows]
            edges = np.stack([self.begins[rows], ends], axis=1).ravel()
            if edges[-1] == flat.size:
                edges = edges[:-1]
            out[rows] = ufunc.reduceat(flat, edges)[::2]
        if self.grouping.alone:
            return out
        return np.asarray(ufunc.reduceat(out, self.grouping.firsts))

    def float_wires(self, narrow: int | None) -> Places:
        """Return each group's dtype: its own, or `narrow` where all of the group fits."""
        code = self.column.dtype.code
        wires = np.full(len(self.grouping.counts), code)
        if narrow is None or code not in (FLOAT32, FLOAT64):
            return wires
        lost = self._as_wire(narrow).isinf() & ~self.column.tensor.isinf()
        if not bool(lost.any()):
            return np.full_like(wires, narrow)
        rows = np.searchsorted(self.column.starts, lost.nonzero()[:, 0].numpy(), side="right") - 1
        groups = np.searchsorted(self.grouping.firsts, rows, side="right") - 1
        fits = np.ones(len(wires), dtype=bool)
        fits[groups] = False
        return np.where(fits, narrow, wires)

    def _as_wire(self, wire: int) -> Tensor:
        return self.column.tensor.to(torch.float16 if wire == FLOAT16 else torch.bfloat16)

    def nbytes(self, wires: Places) -> Places:
        """Return the bytes of each group's body."""
        each = wires if self.grouping.alone else np.repeat(wires, self.grouping.counts)
        sizes = np.where(each == BOOL, (self.counts + 7) // 8, self.counts * _SIZES[each])
        if self.grouping.alone:
            return sizes
        return np.asarray(np.add.reduceat(sizes, self.grouping.firsts))

    def bodies(self, wires: Places) -> list[Sequence[bytes | memoryview]]:
        """Return each group's body; slices of one array for each wire dtype that occurs."""
        kinds = wires.tolist()
        takes = {wire: self._take(wire) for wire in set(kinds)}
        begins, ends = self.begins.tolist(), (self.begins + self.counts).tolist()
        if self.grouping.alone:
            return [
                (takes[wire](begin, end),) if begin < end else ()
                for wire, begin, end in zip(kinds, begins, ends, strict=True)
            ]
        bodies: list[Sequence[bytes | memoryview]] = []
        row = 0
        for wire, count in zip(kinds, self.grouping.counts.tolist(), strict=True):
            spans = _joined(begins[row : row + count], ends[row : row + count], wire)
            row += count
            bodies.append([takes[wire](begin, end) for begin, end in spans])
        return bodies

    def _take(self, wire: int) -> Callable[[int, int], memoryview]:
        """Return what gives the wire's bytes of the elements from one index to another."""
        if wire == BOOL:
            flat = self.column.flat
            return lambda begin, end: np.packbits(flat[begin:end], bitorder="little").data
        dtype = DTYPES[wire]
        if wire in (FLOAT16, BFLOAT16) and wire != self.column.dtype.code:
            array = storage_of(self._as_wire(wire), dtype)
        else:
            array = self.column.flat.astype(dtype.storage, copy=False)
        view, size = array.view(np.uint8).data, dtype.itemsize
        return lambda begin, end: view[begin * size : end * size]


def _joined(begins: list[int], ends: list[int], wire: int) -> list[tuple[int, int]]:
    """Return the spans that are not empty; neighbours become one, except bits."""
    spans: list[tuple[int, int]] = []
    for begin, end in zip(begins, ends, strict=True):
        if begin == end:
            continue
        if spans and spans[-1][1] == begin and wire != BOOL:
            spans[-1] = (spans[-1][0], end)
        else:
            spans.append((begin, end))
    return spans
