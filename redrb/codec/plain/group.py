"""`Group`: one blob, checked in full, whose samples can be decoded, alone or into padded rows."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from redrb.codec.dtypes import BFLOAT16, BOOL, DTYPES, FLOAT64, UINT64, DType, Storage
from redrb.codec.kernels import NOWHERE
from redrb.codec.plain.header import (
    HeaderReader,
    find_sections,
    integer_alone,
    read_entry,
    read_shape,
)
from redrb.codec.wire import MAX_SAMPLES, PREFIX, decoded_limit, malformed, tensor_limit


def memory(address: int, dtype: DType, count: int) -> Storage:
    """Return `count` elements at an address that the caller keeps alive."""
    if count == 0:
        return np.empty(0, dtype.storage)
    raw = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address)
    found: Storage = np.frombuffer(memoryview(raw), dtype.storage)
    return found


def bits_of(value: int, dtype: DType) -> Any:
    """Return a value of a header as one element, by its bits."""
    return np.array(value & (1 << 8 * dtype.itemsize) - 1, np.uint64).astype(dtype.storage)


@dataclass(frozen=True, slots=True)
class Piece:
    """Where one sample of one column lies."""

    shape: tuple[int, ...]
    count: int
    lead: int
    lead_value: int
    trail: int
    trail_value: int
    start: int


class Group:
    """One blob, checked in full; see `kernels.Group`."""

    def __init__(self, blob: Any, lookup: Any) -> None:
        self.blob = memoryview(blob)
        header_at, extras_at, body_at = find_sections(self.blob)
        self.fields, codes = lookup(bytes(self.blob[PREFIX.size : header_at]))
        self._codes = list(zip(codes[::2], codes[1::2], strict=True))
        self.extras = bytes(self.blob[extras_at:body_at])
        header = HeaderReader(self.blob[header_at:extras_at])
        length, self.samples, columns = header.array(), header.integer(), header.array()
        if length < 3 or not 1 <= self.samples <= MAX_SAMPLES or columns != len(self._codes):
            malformed("its header has not the samples and columns that it needs")
        entries = [read_entry(header, self.samples, code) for code, _ in self._codes]
        shapes = [read_shape(header) for _ in range(header.array())]
        self.tails = length - 3
        rest = header.rest()
        if self.tails == 0 and rest:
            malformed("something follows its header")
        self.version = integer_alone(rest) if self.tails == 1 else None
        self.tail = rest if self.version is None else None
        self._place(entries, shapes, body_at)

    def _place(self, entries: list[list[Any]], shapes: list[tuple[int, ...]], end: int) -> None:
        """Find where each sample's body lies, one behind the other."""
        self.decoded_bytes = tensors = 0
        self.placed: list[list[Piece | None]] = []
        for (code, wire), entry in zip(self._codes, entries, strict=True):
            column: list[Piece | None] = []
            for ref, lead, lead_value, trail, trail_value in entry:
                if ref is None:
                    column.append(None)
                    continue
                if not ref < len(shapes):
                    malformed("a column refers to a shape that is not there")
                count = math.prod(shapes[ref])
                tensors += 1
                self.decoded_bytes += count * DTYPES[code].itemsize
                body = count - lead - trail
                if body < 0:
                    malformed("a column has runs longer than its shape")
                column.append(Piece(shapes[ref], body, lead, lead_value, trail, trail_value, end))
                end += (body + 7) >> 3 if wire == BOOL else body * DTYPES[wire].itemsize
            self.placed.append(column)
        if end != len(self.blob):
            malformed("its columns do not end where it ends")
        if self.decoded_bytes > decoded_limit(len(self.blob)):
            malformed("it says that it decodes to much more than its bytes")
        if tensors > tensor_limit(len(self.blob)):
            malformed("it has many more tensors than bytes")

    def pieces(self, column: int) -> list[tuple[Any, ...] | None]:
        """Return the shape, the stored elements and the runs of each sample of a column."""
        return [
            None
            if piece is None
            else (
                piece.shape,
                piece.count,
                piece.lead,
                piece.lead_value,
                piece.trail,
                piece.trail_value,
            )
            for piece in self.placed[column]
        ]

    def read(self, column: int, sample: int, address: int, nbytes: int) -> None:
        """Decode one sample of a column to memory of exactly its size."""
        piece = self.placed[column][sample]
        dtype = DTYPES[self._codes[column][0]]
        if piece is None or math.prod(piece.shape) * dtype.itemsize != nbytes:
            raise ValueError("the memory has another size than the sample")
        self.write(column, piece, memory(address, dtype, math.prod(piece.shape)))

    def write(self, column: int, piece: Piece, to: Storage) -> None:
        """Decode a sample into an array of its elements."""
        code, wire = self._codes[column]
        end = len(to) - piece.trail
        to[: piece.lead] = bits_of(piece.lead_value, DTYPES[code])
        to[end:] = bits_of(piece.trail_value, DTYPES[code])
        body = self.blob[piece.start :]
        if not piece.count:
            return
        if wire == BOOL:
            bits = np.frombuffer(body, np.uint8, (piece.count + 7) >> 3)
            to[piece.lead : end] = np.unpackbits(bits, count=piece.count, bitorder="little")
            return
        stored = np.frombuffer(body, DTYPES[wire].storage, piece.count)
        if wire == code or code <= UINT64:
            to[piece.lead : end] = stored
            return
        floats = to.view(np.float64 if code == FLOAT64 else np.float32)
        if wire == BFLOAT16:
            floats[piece.lead : end] = (stored.astype(np.uint32) << 16).view(np.float32)
        else:
            floats[piece.lead : end] = stored.view(np.float16)


def parse(blob: Any, lookup: Any) -> Group:
    """Check a blob in full; raises DecodeError."""
    return Group(blob, lookup)


def _rows(groups: tuple[Group, ...], places: bytes) -> Iterator[tuple[Group, int, Piece | None]]:
    for group, place in zip(groups, places, strict=True):
        nothing: list[Piece | None] = [None] * group.samples
        pieces = nothing if place == NOWHERE else group.placed[place]
        for piece in pieces:
            yield group, place, piece


def extent(groups: tuple[Group, ...], places: bytes) -> tuple[Any, int, bool] | None:
    """Return a column's first shape, longest first dimension, and whether all are alike.

    None where a row lacks the column, or differs in more than its first dimension. `places` are the
    column's places in the groups; NOWHERE in groups without it.
    """
    shapes = [None if piece is None else piece.shape for _, _, piece in _rows(groups, places)]
    known = [shape for shape in shapes if shape is not None]
    if len(known) < len(shapes) or len({(len(shape), shape[1:]) for shape in known}) != 1:
        return None
    longest = max(shape[0] if shape else 0 for shape in known)
    return known[0], longest, known.count(known[0]) == len(known)


def fill(
    groups: tuple[Group, ...],
    places: bytes,
    address: int,
    nbytes: int,
    code: int,
    row_elements: int,
    left: bool,  # noqa: FBT001
    filler: int,
) -> None:
    """Decode a column into padded rows, one a sample.

    Padding has the bits `filler`, and stands on the left or on the right. A row without this
    column is padding alone.
    """
    dtype = DTYPES[code]
    rows = list(_rows(groups, places))
    if len(rows) * row_elements * dtype.itemsize != nbytes:
        raise ValueError("the memory has another size than the rows")
    table = memory(address, dtype, len(rows) * row_elements).reshape(len(rows), row_elements)
    for row, (group, place, piece) in enumerate(rows):
        table[row] = bits_of(filler, dtype)
        if piece is not None:
            held = math.prod(piece.shape)
            at = row_elements - held if left else 0
            group.write(place, piece, table[row, at : at + held])
