"""Bodies of the columns of groups of one sample, all of one shape: the fast path of `bodies`.

Each row of the column is a group. The bytes are the same as those of `bodies`, which also encodes
the rare cases: floats that are narrowed, negative integers, rows of different widths.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias

import numpy as np

from redrb.codec.bodies import Part, encode_column
from redrb.codec.columns import Column, Grouping
from redrb.codec.wire import (
    BOOL,
    DTYPES,
    FLOAT32,
    FLOAT64,
    MIN_RUN,
    UINT8,
    UINT64,
    DType,
    Storage,
)

Note: TypeAlias = tuple[int, ...]
"""The runs of a row as the header holds them: lead, lead value, trail, trail value, without
trailing zeros."""
Span: TypeAlias = tuple[int, int]
"""Where a row's body begins and ends in the flat column."""

_MAXIMA = (1, 2**8 - 1, 2**16 - 1, 2**32 - 1)
_WIRES = (BOOL, UINT8, UINT8 + 1, UINT8 + 2, UINT64)


@dataclass(slots=True)
class LoneColumn:
    """One field of groups of one sample, ready for the wire.

    Attributes:
        wires: Dtype code of each group's body.
        notes: Each group's runs; None if no group has any.
        bodies: Each group's body; None if all are empty.
        nbytes: Bytes of each group's body, or one number for all.
    """

    wires: list[int]
    notes: list[Note] | None
    bodies: Sequence[Part] | None
    nbytes: list[int] | int


def encode_lone(column: Column, narrow: int | None) -> LoneColumn:
    """Encode one field as `encode_column` does, for groups of one sample of one shape.

    Args:
        column: At least one sample; `column.shape` is not None.
        narrow: As for `encode_column`.
    """
    code, flat = column.dtype.code, column.flat
    if narrow is not None and code in (FLOAT32, FLOAT64):
        return _rare(column, narrow)
    rows = flat.reshape(len(column.shapes), -1) if flat.size else flat.reshape(-1, 1)
    notes = _find_runs(rows, flat)
    if notes is None and (code > UINT64 or code == BOOL):
        whole = rows if code > UINT64 else np.packbits(rows, axis=1, bitorder="little")
        return _evenly(code, len(column.shapes), whole)
    spans = _spans(notes, len(column.shapes), flat.size // len(column.shapes))
    if not spans:
        return LoneColumn([code if code > UINT64 else BOOL] * len(column.shapes), notes, None, 0)
    if code > UINT64:
        wires = [code] * len(spans)
        return LoneColumn(wires, notes, *_slices(flat, spans, DTYPES[code].itemsize))
    wire = BOOL if code == BOOL else _integer_wire(flat, spans, column.dtype)
    if wire is None:
        return _rare(column, narrow)
    if wire == BOOL:
        return LoneColumn([BOOL] * len(spans), notes, *_bits(flat, spans))
    if notes is None:
        return _evenly(wire, len(spans), flat.astype(DTYPES[wire].storage, copy=False))
    wires = [wire if begin < end else BOOL for begin, end in spans]
    body = flat.astype(DTYPES[wire].storage, copy=False)
    return LoneColumn(wires, notes, *_slices(body, spans, DTYPES[wire].itemsize))


def _find_runs(rows: Storage, flat: Storage) -> list[Note] | None:
    """Return the runs of one value at each row's start and end; None if no row has any."""
    count = rows.shape[1]
    if count < MIN_RUN or not flat.size:
        return None
    leads = (rows[:, 0] == rows[:, MIN_RUN - 1]).tolist()
    trails = (rows[:, -1] == rows[:, -MIN_RUN]).tolist()
    if True not in leads and True not in trails:
        return None
    firsts, lasts = rows[:, 0].tolist(), rows[:, -1].tolist()
    changes = (flat[1:] != flat[:-1]).tobytes()
    find, rfind = changes.find, changes.rfind
    if find(1) < 0:  # such as a mask of ones
        return [(count, firsts[0])] * len(rows)
    notes: list[Note] = []
    begin = 0
    for lead, trail, first, last in zip(leads, trails, firsts, lasts, strict=True):
        end = begin + count - 1
        note: Note = ()
        if lead:
            change = find(1, begin, end)
            if change < 0:
                note, trail = (count, first), False
            elif change - begin >= MIN_RUN - 1:
                note = (change + 1 - begin, first)
        if trail:
            length = end - rfind(1, begin, end)
            if length >= MIN_RUN:
                note = (*(note or (0, 0)), length, last)
        notes.append(note)
        begin += count
    return notes if any(notes) else None


def _spans(notes: Sequence[Note] | None, samples: int, count: int) -> list[Span]:
    """Return where the rows' bodies lie without their runs; empty if all bodies are."""
    if notes is None:
        return [(row * count, row * count + count) for row in range(samples)] if count else []
    if all(sum(note[::2]) == count for note in notes):  # such as any mask of one or two runs
        return []
    return [
        (
            begin + note[0] if note else begin,
            begin + count - note[2] if len(note) > 2 else begin + count,
        )
        for note, begin in zip(notes, range(0, samples * count, count), strict=True)
    ]


def _integer_wire(flat: Storage, spans: Sequence[Span], dtype: DType) -> int | None:
    """Return the narrowest dtype of the bodies; None if it differs or a value is negative."""
    edges = [*chain.from_iterable([span for span in spans if span[0] < span[1]])]
    if edges[-1] == flat.size:
        edges.pop()
    highs = np.maximum.reduceat(flat.view(dtype.unsigned), edges)[::2].tolist()
    low, high = bisect_left(_MAXIMA, min(highs)), bisect_left(_MAXIMA, max(highs))
    if low != high or max(highs) > dtype.high:
        return None
    wire = _WIRES[high]
    return dtype.code if wire != BOOL and DTYPES[wire].itemsize >= dtype.itemsize else wire


def _evenly(wire: int, samples: int, body: Storage) -> LoneColumn:
    """Return a column without runs whose rows are equal parts of `body`."""
    size = body.nbytes // samples
    if not size:
        return LoneColumn([wire] * samples, None, None, 0)
    view = body.reshape(-1).view(np.uint8).data
    slices = [view[at : at + size] for at in range(0, size * samples, size)]
    return LoneColumn([wire] * samples, None, slices, size)


def _slices(body: Storage, spans: Sequence[Span], size: int) -> tuple[list[Part], list[int]]:
    """Return the bodies as slices of an array with elements of `size` bytes, and their lengths."""
    view = body.view(np.uint8).data
    slices: list[Part] = [view[begin * size : end * size] for begin, end in spans]
    return slices, [(end - begin) * size for begin, end in spans]


def _bits(flat: Storage, spans: Sequence[Span]) -> tuple[list[Part], list[int]]:
    """Return the bodies as bits, each in whole bytes, and their lengths."""
    parts: list[Part] = [
        np.packbits(flat[begin:end], bitorder="little").data if begin < end else b""
        for begin, end in spans
    ]
    return parts, list(map(len, parts))


def _rare(column: Column, narrow: int | None) -> LoneColumn:
    """Encode a rare case with `encode_column`."""
    encoded = encode_column(column, Grouping.lone(len(column.shapes)), narrow)
    notes: list[Note] | None = None
    if encoded.runs is not None:
        runs = zip(*(part.tolist() for part in encoded.runs), strict=True)
        notes = [run if run[2] else run[:2] if run[0] else () for run in runs]
    bodies: list[Part] = [body[0] if body else b"" for body in encoded.bodies]
    return LoneColumn(encoded.wires, notes, bodies, encoded.nbytes.tolist())
