"""Reads a blob's sections and header; every number is checked before it is used."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from functools import partial
from typing import Any

from redrb.codec.dtypes import DTYPES
from redrb.codec.wire import (
    INT64_RANGE,
    MAGIC,
    MAX_BLOB_BYTES,
    MAX_ELEMENTS,
    MAX_EXTRAS_BYTES,
    MAX_HEADER_BYTES,
    MAX_RANK,
    PREFIX,
    VERSION,
    malformed,
)


def find_sections(blob: memoryview) -> tuple[int, int, int]:
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


class HeaderReader:
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


def integer_alone(data: bytes) -> int | None:
    """Return the 64-bit integer that msgpack bytes are; None where they are anything else."""
    tag = data[0] if data else 0xC0
    if 0x80 <= tag < 0xE0 and tag not in HeaderReader._INTEGERS:  # noqa: SLF001
        return None
    reader = HeaderReader(memoryview(data))
    value = reader.integer()
    return value if not reader.rest() and value in INT64_RANGE else None


def read_entry(header: HeaderReader, samples: int, code: int) -> list[Any]:
    """Return shape, lead, its value, trail and its value of each sample."""
    if not header.is_array():
        return [(_length(header), 0, 0, 0, 0)] * samples
    length = header.array()
    if not 1 <= length <= 5:
        malformed("a column is placed by neither a shape nor a short list")
    value = partial(_value, code)
    readers: list[Callable[[HeaderReader], int | None]] = [_ref, _length, value, _length, value]
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


def _ref(header: HeaderReader) -> int | None:
    if header.nil():
        return None
    ref = header.integer()
    if ref < 0:
        malformed("a column refers to no shape")
    return ref


def _length(header: HeaderReader) -> int:
    length = header.integer()
    if not 0 <= length <= MAX_ELEMENTS:
        malformed("a column has a run of no length")
    return length


def _value(code: int, header: HeaderReader) -> int:
    value = header.integer()
    if not DTYPES[code].low <= value <= DTYPES[code].high:
        malformed("a run has a value that its dtype lacks")
    return value


def read_shape(header: HeaderReader) -> tuple[int, ...]:
    """Return the next shape."""
    rank = header.array()
    if rank > MAX_RANK:
        malformed("a shape is no short list")
    shape = tuple(header.integer() for _ in range(rank))
    if any(not 0 <= size <= MAX_ELEMENTS for size in shape):
        malformed("a dimension is out of range")
    if math.prod(size or 1 for size in shape) > MAX_ELEMENTS:
        malformed("a shape is too large")
    return shape
