"""The layout of a version: dtypes on the wire, the place of each tensor's bytes, its chunks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from redrb.weights.wire.delta import Run

ALIGNMENT: Final = 64
CHUNK_BYTES: Final = (4 << 20) - 4096
"""Bytes of a chunk: with its header it fits into 4 MiB, the size class of a server's allocator (the
next one is 5 MiB). From 8 MiB on servers fall to a third of their speed. A multiple of `ALIGNMENT`,
so that no element lies in two chunks."""

ITEM_BYTES: Final[Mapping[str, int]] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "uint32": 4,
    "int32": 4,
    "uint64": 8,
    "int64": 8,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
"""Dtypes on the wire, by torch's names, and the bytes of one element."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor whose bytes are contiguous: the whole tensor, or one rank's shard.

    Attributes:
        start: Index of its first element in the tensor.
        shape: Shape of the box.
        offset: Offset of its first byte in the state, a multiple of `ALIGNMENT`.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]
    offset: int

    @property
    def elements(self) -> int:
        """Number of its elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a version, and the places of its bytes.

    Attributes:
        name: Name in the state dict.
        dtype: A key of `ITEM_BYTES`.
        shape: Shape of the whole tensor.
        pieces: Boxes that make up the tensor: one, or several if it was published in shards.
        alias: The earlier tensor that it is tied to, or None. Tied tensors are stored once.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    alias: str | None = None

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return ITEM_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.item_bytes

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of one piece inside one chunk.

    Attributes:
        piece: Index of the piece in `Layout.pieces`.
        width: Bytes of one number.
        in_piece: Offset of the first byte in the piece.
        in_chunk: Offset of the first byte in the chunk.
        nbytes: Number of bytes.
    """

    piece: int
    width: int
    in_piece: int
    in_chunk: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Order and places of all tensors of a version."""

    tensors: tuple[TensorEntry, ...]
    nbytes: int
    chunk_bytes: int

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return -(-self.nbytes // self.chunk_bytes)

    def size(self, index: int) -> int:
        """Return the bytes of chunk `index`."""
        return min(self.chunk_bytes, self.nbytes - index * self.chunk_bytes)

    def pieces(self) -> list[tuple[TensorEntry, Piece]]:
        """Return the pieces of all tensors that are not tied to an earlier one."""
        return [
            (tensor, piece)
            for tensor in self.tensors
            if tensor.alias is None
            for piece in tensor.pieces
        ]

    def spans(self) -> list[list[Span]]:
        """Return the spans in each chunk, in order."""
        by_chunk: list[list[Span]] = [[] for _ in range(self.chunks)]
        for number, (tensor, piece) in enumerate(self.pieces()):
            for span, index in self._spans_of(number, tensor, piece):
                by_chunk[index].append(span)
        for spans in by_chunk:
            spans.sort(key=lambda span: span.in_chunk)
        return by_chunk

    def _spans_of(
        self, number: int, tensor: TensorEntry, piece: Piece
    ) -> Iterator[tuple[Span, int]]:
        # a complex number is two numbers
        width = tensor.item_bytes // (2 if tensor.dtype.startswith("complex") else 1)
        done, nbytes = 0, piece.elements * tensor.item_bytes
        while done < nbytes:
            index, in_chunk = divmod(piece.offset + done, self.chunk_bytes)
            part = min(self.chunk_bytes - in_chunk, nbytes - done)
            yield Span(number, width, done, in_chunk, part), index
            done += part


def runs_of(spans: Sequence[Span]) -> list[Run]:
    """Return the runs of items of equal width that a chunk's spans make up."""
    runs: list[Run] = []
    for span in spans:
        last = runs[-1] if runs else None
        if last is not None and last.width == span.width:
            # the padding between two tensors is zeros in every version
            runs[-1] = Run(last.start, span.in_chunk + span.nbytes - last.start, span.width)
        else:
            runs.append(Run(span.in_chunk, span.nbytes, span.width))
    return runs


def tile(shape: tuple[int, ...], pieces: Sequence[Piece]) -> bool:
    """Whether boxes inside of `shape` cover each element exactly once.

    Ranks' boxes lie on a grid, so each box must fill the gap between two cuts in every dimension.
    """
    if sum(piece.elements for piece in pieces) != math.prod(shape):
        return False
    boxes = [piece for piece in pieces if piece.elements]
    if not boxes:
        return True
    cuts = [sorted({piece.start[axis] for piece in boxes}) for axis in range(len(shape))]
    ends = [
        dict(zip(starts, [*starts[1:], size], strict=True))
        for starts, size in zip(cuts, shape, strict=True)
    ]
    for piece in boxes:
        for axis, (start, size) in enumerate(zip(piece.start, piece.shape, strict=True)):
            if ends[axis][start] != start + size:
                return False
    return len({piece.start for piece in boxes}) == len(boxes)
