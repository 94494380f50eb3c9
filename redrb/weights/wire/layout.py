"""The layout of a version: dtypes on the wire, the place of each tensor's bytes, its chunks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec
import xxhash
from msgspec import Meta

from redrb.checks import MOST
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


MAX_DIMENSIONS: Final = 64
MAX_NAME_LENGTH: Final = 1024

Whole = Annotated[int, Meta(ge=0, le=MOST)]


class TensorEntry(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One tensor of a version, and the place of its bytes.

    Attributes:
        dtype: A key of `ITEM_BYTES`.
        offset: Offset of its first byte in the state, a multiple of `ALIGNMENT`.
        alias: The earlier tensor that it is tied to, or None. Tied tensors are stored once.
    """

    name: Annotated[str, Meta(min_length=1, max_length=MAX_NAME_LENGTH)]
    dtype: str
    shape: Annotated[tuple[Whole, ...], Meta(max_length=MAX_DIMENSIONS)]
    offset: Whole
    alias: str | None = None

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return ITEM_BYTES[self.dtype]

    @property
    def elements(self) -> int:
        """Number of its elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.elements * self.item_bytes

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of one tensor inside one chunk.

    Attributes:
        owner: Index of the tensor in `Layout.owners`.
        width: Bytes of one number.
        in_tensor: Offset of the first byte in the tensor.
        in_chunk: Offset of the first byte in the chunk.
    """

    owner: int
    width: int
    in_tensor: int
    in_chunk: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Order and places of all tensors of a version."""

    tensors: tuple[TensorEntry, ...]
    nbytes: int
    chunk_bytes: int

    @property
    def id(self) -> int:
        """Hash of the names, dtypes, shapes and places of all tensors."""
        return xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(self.tensors))

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return -(-self.nbytes // self.chunk_bytes)

    def size(self, index: int) -> int:
        """Return the bytes of chunk `index`."""
        return min(self.chunk_bytes, self.nbytes - index * self.chunk_bytes)

    def owners(self) -> list[TensorEntry]:
        """Return the tensors that are not tied to an earlier one."""
        return [tensor for tensor in self.tensors if tensor.alias is None]

    def spans(self) -> list[list[Span]]:
        """Return the spans in each chunk, in order."""
        by_chunk: list[list[Span]] = [[] for _ in range(self.chunks)]
        for number, tensor in enumerate(self.owners()):
            # a complex number is two numbers
            width = tensor.item_bytes // (2 if tensor.dtype.startswith("complex") else 1)
            done = 0
            while done < tensor.nbytes:
                index, in_chunk = divmod(tensor.offset + done, self.chunk_bytes)
                part = min(self.chunk_bytes - in_chunk, tensor.nbytes - done)
                by_chunk[index].append(Span(number, width, done, in_chunk, part))
                done += part
        for spans in by_chunk:
            spans.sort(key=lambda span: span.in_chunk)
        return by_chunk


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
