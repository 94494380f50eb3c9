"""A tensor or array in a column of a table's row, called a cell: its bytes, and a column of them.

A cell is a byte that says what it is, the code of its dtype (`redrb.codec.dtypes`), the number of
its dimensions, each of them as 4 bytes, and its elements in C order; all little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from math import prod
from typing import Final

from redrb.codec.dtypes import DTYPES
from redrb.codec.kernels import Shape
from redrb.codec.wire import MAX_ELEMENTS, MAX_RANK

TENSOR, ARRAY = range(2)
HEAD: Final = struct.Struct("<BBB")
_SHAPES: Final = tuple(struct.Struct(f"<{rank}I") for rank in range(MAX_RANK + 1))


def read_cell(cell: memoryview) -> tuple[int, int, Shape, memoryview] | None:
    """Return kind, dtype's code, shape and elements; None where it is no tensor and no array."""
    try:
        kind, code, rank = HEAD.unpack_from(cell)
        shape = _SHAPES[rank].unpack_from(cell, HEAD.size)
        itemsize = DTYPES[code].storage.itemsize
    except (struct.error, IndexError):
        return None
    elements = cell[HEAD.size + 4 * rank :]
    sound = prod(shape) * itemsize == len(elements) and spread(shape) <= MAX_ELEMENTS
    return (kind, code, shape, elements) if sound and kind <= ARRAY else None


def spread(shape: Sequence[int]) -> int:
    """Return the number of elements that strides span, even where a dimension is 0."""
    return prod(size or 1 for size in shape)


def gather(
    parts: tuple[bytes, ...], begins: tuple[int, ...], lengths: tuple[int, ...]
) -> tuple[int, int, bytearray, list[Shape]] | None:
    """Return kind, dtype's code, elements and shapes of a column; None where these differ.

    Args:
        parts: Where the cell of each row lies.
        begins, lengths: The part of it that is the cell.
    """
    cells = []
    for part, begin, length in zip(parts, begins, lengths, strict=True):
        if not 0 <= begin <= begin + length <= len(part):
            raise ValueError("a cell lies beyond its part")
        cells.append(read_cell(memoryview(part)[begin : begin + length]))
    known = [cell for cell in cells if cell is not None]
    if len({cell[:2] for cell in known}) != 1 or len(known) < len(cells):
        return None
    joined = bytearray().join([elements for *_, elements in known])
    return known[0][0], known[0][1], joined, [shape for _, _, shape, _ in known]
