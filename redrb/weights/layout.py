"""Where the bytes of each tensor lie in a version, and in which of its chunks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

ALIGNMENT: Final = 64
CHUNK_BYTES: Final = 4 << 20
"""Servers fall to a third of their speed from 8 MiB on."""

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
"""Dtypes of the wire, by torch's names, and bytes of one element."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor's bytes are.

    Attributes:
        name: Its name in the state dict.
        dtype: One of `ITEM_BYTES`.
        shape: Its shape.
        offset: Of its first byte in the concatenation, a multiple of `ALIGNMENT`.
        alias: The earlier tensor that it is tied to, if any; its bytes are stored once.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    alias: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of one tensor inside one chunk; all in bytes."""

    name: str
    in_tensor: int
    in_chunk: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Order and place of all tensors of a version."""

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

    def spans(self) -> list[list[Span]]:
        """Return for each chunk the pieces of tensors in it, by their place."""
        by_chunk: list[list[Span]] = [[] for _ in range(self.chunks)]
        for tensor in self.tensors:
            if tensor.alias is None:
                for span, index in _spans_of(tensor, self.chunk_bytes):
                    by_chunk[index].append(span)
        return by_chunk


def _spans_of(tensor: TensorEntry, chunk_bytes: int) -> Iterator[tuple[Span, int]]:
    done = 0
    while done < tensor.nbytes:
        index, in_chunk = divmod(tensor.offset + done, chunk_bytes)
        nbytes = min(chunk_bytes - in_chunk, tensor.nbytes - done)
        yield Span(tensor.name, done, in_chunk, nbytes), index
        done += nbytes
