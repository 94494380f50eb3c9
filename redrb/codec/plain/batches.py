"""Decodes one column of many groups into padded rows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from redrb.codec.dtypes import DTYPES
from redrb.codec.kernels import NOWHERE
from redrb.codec.plain.group import Group, Piece
from redrb.codec.plain.memory import bits_of, memory


def _rows(groups: tuple[Group, ...], places: bytes) -> Iterator[tuple[Group, int, Piece | None]]:
    for group, place in zip(groups, places, strict=True):
        nothing: list[Piece | None] = [None] * group.samples
        pieces = nothing if place == NOWHERE else group.placed[place]
        for piece in pieces:
            yield group, place, piece


def extent(groups: tuple[Group, ...], places: bytes) -> tuple[Any, int, bool] | None:
    """Return the shapes of one column of many groups; see `Kernel.extent`."""
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
    """Decode a column into padded rows; see `Kernel.fill`."""
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
