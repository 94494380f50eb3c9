"""The codec's inner loops in plain Python: the specification in code, where nothing is compiled.

It does the same as `_core.c`, is held to the same tests, and is written to be read: one sample and
one column at a time. `docs/wire-format.md` describes the bytes.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgpack
import numpy as np

from redrb.codec.wire import (
    BFLOAT16,
    BOOL,
    DTYPES,
    FLOAT64,
    INT8,
    INT64,
    INT64_RANGE,
    MAGIC,
    MAX_BLOB_BYTES,
    MAX_ELEMENTS,
    MAX_EXTRAS_BYTES,
    MAX_HEADER_BYTES,
    MAX_RANK,
    MAX_SAMPLES,
    MAX_SCHEMA_BYTES,
    MIN_RUN,
    PREFIX,
    UINT8,
    UINT64,
    VERSION,
    DType,
    Storage,
    decoded_limit,
    malformed,
)
from redrb.errors import EncodeError

_SIGNED = range(INT8, INT64 + 1)
_UNSIGNED = range(UINT8, UINT64 + 1)


def memory(address: int, dtype: DType, count: int) -> Storage:
    """Return `count` elements at an address that the caller keeps alive."""
    if count == 0:
        return np.empty(0, dtype.storage)
    raw = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address)
    found: Storage = np.frombuffer(memoryview(raw), dtype.storage)
    return found


def collect(
    rows: Sequence[Any],  # noqa: ARG001
    names: tuple[str, ...],  # noqa: ARG001
    tensor: type,  # noqa: ARG001
    held: list[Any],  # noqa: ARG001
) -> None:
    """Say that tensors have to be asked one by one."""
    return


# Encoding: runs are taken off, the rest is stored in the narrowest dtype that loses nothing.


@dataclass(slots=True)
class _Sample:
    """One sample of one column: its elements, its runs, and what remains for the body."""

    shape: tuple[int, ...]
    body: Storage
    lead: int = 0
    lead_value: int = 0
    trail: int = 0
    trail_value: int = 0


def encode(samples: int, columns: list[Any], tails: int, tail: bytes, extras: bytes) -> bytes:
    """Return the blob of one group; see `Kernel.encode`."""
    shapes: dict[tuple[int, ...], int] = {}
    schema, entries, bodies, decoded = [], [], [], 0
    for key, code, rounded, cells in columns:
        dtype = DTYPES[code]
        column = [_sample(cell, dtype, rounded, shapes) for cell in cells]
        present = [sample for sample in column if sample is not None]
        if not present:
            continue
        wire = rounded if rounded >= 0 else _narrowest(dtype, [sample.body for sample in present])
        schema.append((key, code, wire))
        entries.append(_entry(column, shapes))
        bodies += [_stored(sample.body, wire) for sample in present]
        decoded += sum(math.prod(sample.shape) for sample in present) * dtype.itemsize
    packed_schema: bytes = msgpack.packb(schema)
    if len(packed_schema) > MAX_SCHEMA_BYTES:
        raise EncodeError("the names in `tensors` are too long: shorten them.")
    header = msgpack.Packer().pack_array_header(3 + tails) + b"".join(
        (msgpack.packb(samples), msgpack.packb(entries), msgpack.packb(list(shapes)), tail)
    )
    if len(header) > MAX_HEADER_BYTES:
        raise EncodeError(
            f"a group's header has {len(header)} bytes, the limit is {MAX_HEADER_BYTES}: "
            "use fewer tags or put smaller groups."
        )
    prefix = PREFIX.pack(MAGIC, VERSION, 0, len(packed_schema), len(header), len(extras))
    blob = b"".join((prefix, packed_schema, header, extras, *bodies))
    if len(blob) > MAX_BLOB_BYTES:
        raise EncodeError(
            f"a group has {len(blob)} bytes, the limit is {MAX_BLOB_BYTES}: put smaller groups."
        )
    if decoded > decoded_limit(len(blob)):
        raise EncodeError(
            f"a group of {decoded} bytes is little but runs of one value, {len(blob)} bytes "
            "packed: cut its padding off before putting it."
        )
    return blob


def _sample(
    cell: Any, dtype: DType, rounded: int, shapes: dict[tuple[int, ...], int]
) -> _Sample | None:
    if cell is None:
        return None
    shape = tuple(cell[1])
    if len(shape) > MAX_RANK or math.prod(size or 1 for size in shape) > MAX_ELEMENTS:
        raise ValueError("a shape is too large")
    shapes.setdefault(shape, len(shapes))
    flat = memory(cell[0], dtype, math.prod(shape))
    if dtype.code == BOOL:
        flat = (flat != 0).view(np.uint8)
    sample = _Sample(shape, flat)
    lead = _run(flat)
    if lead >= MIN_RUN:
        sample.lead, sample.lead_value = lead, int(flat[0])
    trail = _run(flat[::-1])
    if trail >= MIN_RUN and sample.lead < len(flat):
        sample.trail, sample.trail_value = trail, int(flat[-1])
    if rounded >= 0:
        flat = memory(cell[2], DTYPES[rounded], math.prod(shape))
    sample.body = flat[sample.lead : len(flat) - sample.trail]
    return sample


def _run(flat: Storage) -> int:
    """Return how many elements at the start are one value."""
    if len(flat) == 0:
        return 0
    changes = np.flatnonzero(flat != flat[0])
    return int(changes[0]) if len(changes) else len(flat)


def _narrowest(dtype: DType, bodies: list[Storage]) -> int:
    """Return the code of the narrowest dtype that holds the bodies of a whole group."""
    integer = dtype.code in (*_SIGNED, *_UNSIGNED)
    if not integer and dtype.code != BOOL:
        return dtype.code
    filled = [body for body in bodies if len(body)]
    if not filled or dtype.code == BOOL:
        return BOOL
    low = min(int(body.min()) for body in filled)
    high = max(int(body.max()) for body in filled)
    if low >= 0 and high <= 1:
        return BOOL
    for code in _UNSIGNED if low >= 0 else _SIGNED:
        if DTYPES[code].low <= low and high <= DTYPES[code].high:
            return code if DTYPES[code].itemsize < dtype.itemsize else dtype.code
    return dtype.code


def _stored(body: Storage, wire: int) -> bytes:
    if wire == BOOL:
        return np.packbits(body != 0, bitorder="little").tobytes()
    return body.astype(DTYPES[wire].storage, copy=False).tobytes()


def _entry(column: list[_Sample | None], shapes: dict[tuple[int, ...], int]) -> Any:
    """Return a column's entry in the header: parts that are one for all samples, or a list."""
    refs = _one_or_all([None if sample is None else shapes[sample.shape] for sample in column])
    runs = [
        [0 if sample is None else getattr(sample, name) for sample in column]
        for name in ("lead", "lead_value", "trail", "trail_value")
    ]
    if any(runs[2]):
        return (refs, *map(_one_or_all, runs))
    if any(runs[0]):
        return (refs, *map(_one_or_all, runs[:2]))
    return (refs,) if isinstance(refs, list) else refs


def _one_or_all(values: list[Any]) -> Any:
    return values[0] if values.count(values[0]) == len(values) else values


# Reading: everything is checked before anything is decoded.


@dataclass(frozen=True, slots=True)
class _Piece:
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
        header_at, extras_at, body_at = _sections(self.blob)
        self.fields, codes = lookup(bytes(self.blob[PREFIX.size : header_at]))
        self._codes = list(zip(codes[::2], codes[1::2], strict=True))
        self.extras = bytes(self.blob[extras_at:body_at])
        self.version: int | None = None
        self.tail: bytes | None = None
        header = _Reader(self.blob[header_at:extras_at])
        length, self.samples, columns = header.array(), header.integer(), header.array()
        if length < 3 or not 1 <= self.samples <= MAX_SAMPLES or columns != len(self._codes):
            malformed("its header has not the samples and columns that it needs")
        entries = [_read_entry(header, self.samples, code) for code, _ in self._codes]
        shapes = [_read_shape(header) for _ in range(header.array())]
        self.tails = length - 3
        self._read_tail(header)
        self._place(entries, shapes, body_at)

    def _read_tail(self, header: _Reader) -> None:
        rest = header.rest()
        if self.tails == 0 and rest:
            malformed("something follows its header")
        if self.tails == 1:
            value = _integer_alone(rest)
            if value is not None:
                self.version = value
                return
        self.tail = rest

    def _place(self, entries: list[list[Any]], shapes: list[tuple[int, ...]], end: int) -> None:
        """Find where each sample's body lies, one behind the other."""
        self.decoded_bytes = 0
        self.pieces: list[list[_Piece | None]] = []
        for (code, wire), entry in zip(self._codes, entries, strict=True):
            column: list[_Piece | None] = []
            for ref, lead, lead_value, trail, trail_value in entry:
                if ref is None:
                    column.append(None)
                    continue
                if not ref < len(shapes):
                    malformed("a column refers to a shape that is not there")
                count = math.prod(shapes[ref])
                self.decoded_bytes += count * DTYPES[code].itemsize
                body = count - lead - trail
                if body < 0:
                    malformed("a column has runs longer than its shape")
                column.append(_Piece(shapes[ref], body, lead, lead_value, trail, trail_value, end))
                end += (body + 7) >> 3 if wire == BOOL else body * DTYPES[wire].itemsize
            self.pieces.append(column)
        if end != len(self.blob):
            malformed("its columns do not end where it ends")
        if self.decoded_bytes > decoded_limit(len(self.blob)):
            malformed("it says that it decodes to much more than its bytes")

    def shapes(self, column: int) -> list[tuple[int, ...] | None]:
        """Return the shape of each sample of a column."""
        return [None if piece is None else piece.shape for piece in self.pieces[column]]

    def runs(self, column: int) -> list[tuple[int, int, int, int, int] | None]:
        """Return the stored elements and the runs of each sample of a column."""
        return [
            None
            if piece is None
            else (piece.count, piece.lead, piece.lead_value, piece.trail, piece.trail_value)
            for piece in self.pieces[column]
        ]

    def read(self, column: int, sample: int, address: int, nbytes: int) -> None:
        """Decode one sample of a column to memory of exactly its size."""
        piece = self.pieces[column][sample]
        dtype = DTYPES[self._codes[column][0]]
        if piece is None or math.prod(piece.shape) * dtype.itemsize != nbytes:
            raise ValueError("the memory has another size than the sample")
        self.write(column, piece, memory(address, dtype, math.prod(piece.shape)))

    def write(self, column: int, piece: _Piece, to: Storage) -> None:
        """Decode a sample into an array of its elements."""
        code, wire = self._codes[column]
        end = len(to) - piece.trail
        to[: piece.lead] = _bits(piece.lead_value, DTYPES[code])
        to[end:] = _bits(piece.trail_value, DTYPES[code])
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
        floats[piece.lead : end] = _widened(stored, wire)


def _widened(stored: Storage, wire: int) -> Storage:
    if wire == BFLOAT16:
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.view(np.float16)


def _bits(value: int, dtype: DType) -> Any:
    return np.array(value & (1 << 8 * dtype.itemsize) - 1, np.uint64).astype(dtype.storage)


def parse(blob: Any, lookup: Any) -> Group:
    """Check a blob in full; see `Kernel.parse`."""
    return Group(blob, lookup)


def _sections(blob: memoryview) -> tuple[int, int, int]:
    """Return where header, extras and bodies begin."""
    if not PREFIX.size <= len(blob) <= MAX_BLOB_BYTES:
        malformed(f"it has {len(blob)} bytes")
    magic, version, flags, schema, header, extras = PREFIX.unpack_from(blob)
    if magic != MAGIC:
        malformed("it does not start with RDRB")
    if version != VERSION or flags:
        malformed(
            f"it is written in version {version} with flags {flags}, and only version {VERSION} "
            "without flags is known here: upgrade redrb"
        )
    header_at = PREFIX.size + schema
    extras_at = header_at + header
    body_at = extras_at + extras
    if header > MAX_HEADER_BYTES or extras > MAX_EXTRAS_BYTES or body_at > len(blob):
        malformed("its header or extras are longer than allowed")
    return header_at, extras_at, body_at


class _Reader:
    """Reads the numbers, nils and array headers of a header, one after the other."""

    _INTEGERS = {  # noqa: RUF012
        0xCC: ">B",
        0xCD: ">H",
        0xCE: ">I",
        0xCF: ">Q",
        0xD0: ">b",
        0xD1: ">h",
        0xD2: ">i",
        0xD3: ">q",
    }

    def __init__(self, data: memoryview) -> None:
        self._data = bytes(data)
        self._at = 0

    def rest(self) -> bytes:
        """Return the bytes that were not read yet."""
        return self._data[self._at :]

    def _take(self, form: str) -> int:
        try:
            (value,) = struct.unpack_from(form, self._data, self._at)
        except struct.error:
            malformed("its header ends too early")
        self._at += struct.calcsize(form)
        return int(value)

    def peek(self) -> int:
        """Return the next byte."""
        if self._at >= len(self._data):
            malformed("its header ends too early")
        return self._data[self._at]

    def nil(self) -> bool:
        """Return whether nil comes next, and read it."""
        found = self.peek() == 0xC0
        self._at += found
        return found

    def is_array(self) -> bool:
        """Return whether an array comes next."""
        tag = self.peek()
        return tag & 0xF0 == 0x90 or tag in (0xDC, 0xDD)

    def array(self) -> int:
        """Read an array's length."""
        if not self.is_array():
            malformed("its header lacks a list")
        tag = self._take(">B")
        if tag & 0xF0 == 0x90:
            return tag & 15
        return self._take(">H" if tag == 0xDC else ">I")

    def integer(self) -> int:
        """Read an integer."""
        tag = self.peek()
        if tag < 0x80 or tag >= 0xE0:
            return self._take(">b")
        form = self._INTEGERS.get(tag)
        if form is None:
            malformed("its header has something else in the place of an integer")
        self._at += 1
        return self._take(form)


def _integer_alone(data: bytes) -> int | None:
    """Return the 64-bit integer that msgpack bytes are; None where they are anything else."""
    tag = data[0] if data else 0xC0
    if 0x80 <= tag < 0xE0 and tag not in _Reader._INTEGERS:  # noqa: SLF001
        return None
    reader = _Reader(memoryview(data))
    value = reader.integer()
    return value if not reader.rest() and value in INT64_RANGE else None


def _read_entry(header: _Reader, samples: int, code: int) -> list[Any]:
    """Return shape, lead, its value, trail and its value of each sample."""
    if not header.is_array():
        return [(_length(header), 0, 0, 0, 0)] * samples
    length = header.array()
    if not 1 <= length <= 5:
        malformed("a column is placed by neither a shape nor a short list")
    value = partial(_value, code)
    readers: list[Callable[[_Reader], int | None]] = [_ref, _length, value, _length, value]
    parts: list[list[int | None]] = []
    for read in readers[:length]:
        if not header.is_array():
            parts.append([read(header)] * samples)
            continue
        if header.array() != samples or samples == 1:
            malformed("a list in a column's entry has not one element a sample")
        parts.append([read(header) for _ in range(samples)])
    parts += [[0] * samples] * (5 - length)
    return list(zip(*parts, strict=True))


def _ref(header: _Reader) -> int | None:
    if header.nil():
        return None
    ref = header.integer()
    if ref < 0:
        malformed("a column refers to no shape")
    return ref


def _length(header: _Reader) -> int:
    length = header.integer()
    if not 0 <= length <= MAX_ELEMENTS:
        malformed("a column has a run of no length")
    return length


def _value(code: int, header: _Reader) -> int:
    value = header.integer()
    if not DTYPES[code].low <= value <= DTYPES[code].high:
        malformed("a run has a value that its dtype lacks")
    return value


def _read_shape(header: _Reader) -> tuple[int, ...]:
    rank = header.array()
    if rank > MAX_RANK:
        malformed("a shape is no short list")
    shape = tuple(header.integer() for _ in range(rank))
    if any(not 0 <= size <= MAX_ELEMENTS for size in shape):
        malformed("a dimension is out of range")
    if math.prod(size or 1 for size in shape) > MAX_ELEMENTS:
        malformed("a shape is too large")
    return shape


# Decoding many groups.


def _rows(groups: list[Group], indices: list[int]) -> Iterator[tuple[Group, int, _Piece | None]]:
    for group, index in zip(groups, indices, strict=True):
        nothing: list[_Piece | None] = [None] * group.samples
        pieces = nothing if index < 0 else group.pieces[index]
        for piece in pieces:
            yield group, index, piece


def extent(groups: list[Group], indices: list[int]) -> tuple[Any, int, bool, int, Any, int]:
    """Return the shapes of one column of many groups; see `Kernel.extent`."""
    shapes = [None if piece is None else piece.shape for _, _, piece in _rows(groups, indices)]
    known = [shape for shape in shapes if shape is not None]
    if not known:
        return None, 0, True, -1, None, 0
    first = known[0]
    odd = [
        row
        for row, shape in enumerate(shapes)
        if shape is not None and (len(shape) != len(first) or shape[1:] != first[1:])
    ]
    longest = max(shape[0] if shape else 0 for shape in known)
    missing = shapes.index(None) if None in shapes else -1
    alike = known.count(first) == len(known)
    return first, longest, alike, *((odd[0], shapes[odd[0]]) if odd else (-1, None)), missing


def lengths(groups: list[Group], indices: list[int]) -> list[int]:
    """Return the first dimension of each row; 0 where it has none."""
    shapes = [piece.shape if piece else () for _, _, piece in _rows(groups, indices)]
    return [shape[0] if shape else 0 for shape in shapes]


def fill(
    groups: list[Group],
    indices: list[int],
    address: int,
    nbytes: int,
    code: int,
    row_elements: int,
    left: bool,  # noqa: FBT001
    filler: int,
    ones: list[int] | None,
    one: int,
) -> None:
    """Decode a column into padded rows; see `Kernel.fill`."""
    dtype = DTYPES[code]
    rows = list(_rows(groups, indices))
    if len(rows) * row_elements * dtype.itemsize != nbytes:
        raise ValueError("the memory has another size than the rows")
    table = memory(address, dtype, len(rows) * row_elements).reshape(len(rows), row_elements)
    for row, (group, index, piece) in enumerate(rows):
        held = (ones[row] if ones else 0) if piece is None else math.prod(piece.shape)
        at = row_elements - held if left else 0
        table[row] = _bits(filler, dtype)
        if piece is None:
            table[row, at : at + held] = _bits(one, dtype)
        else:
            group.write(index, piece, table[row, at : at + held])
