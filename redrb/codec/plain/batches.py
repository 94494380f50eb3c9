"""Decodes one column of many groups into padded rows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from redrb.codec.dtypes import DTYPES
from redrb.codec.plain.group import Group, Piece
from redrb.codec.plain.memory import bits_of, memory


def _rows(groups: list[Group], indices: list[int]) -> Iterator[tuple[Group, int, Piece | None]]:
    for group, index in zip(groups, indices, strict=True):
        nothing: list[Piece | None] = [None] * group.samples
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
        table[row] = bits_of(filler, dtype)
        if piece is None:
            table[row, at : at + held] = bits_of(one, dtype)
        else:
            group.write(index, piece, table[row, at : at + held])
