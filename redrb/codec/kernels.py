"""The codec's inner loops: compiled where that was possible, in plain Python elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, Protocol, TypeAlias

Shape: TypeAlias = tuple[int, ...]
Cell: TypeAlias = tuple[int, Shape] | tuple[int, Shape, int]
"""Address and shape of one sample's elements; then, of rounded floats, the address of these."""

EncodedColumn: TypeAlias = tuple[int | str, int, int, list[Cell | None]]
"""Key of the field in the schema, code of its dtype, code of its wire dtype (-1: the narrowest that
loses nothing), and a cell for each sample."""

Lookup: TypeAlias = Callable[[bytes], tuple[tuple[Any, ...], bytes]]
"""From a schema's bytes to its fields, and two bytes for each: codes of dtype and wire dtype."""


class Group(Protocol):
    """One blob, checked in full.

    Attributes:
        samples: Samples in the group.
        decoded_bytes: Bytes of all its tensors.
        fields: Its columns, as `Lookup` returned them.
        version: Policy version of all samples, where the header ends with it.
        tails: How many further elements the header has.
        tail: These elements as msgpack, where they are not `version` alone.
        extras: The extras as msgpack.
    """

    samples: int
    decoded_bytes: int
    fields: tuple[Any, ...]
    version: int | None
    tails: int
    tail: bytes | None
    extras: bytes

    def shapes(self, column: int) -> list[Shape | None]:
        """Return the shape of each sample of a column; None where a sample has none."""

    def runs(self, column: int) -> list[tuple[int, int, int, int, int] | None]:
        """Return of each sample: stored elements, lead, its value, trail, its value."""

    def read(self, column: int, sample: int, address: int, nbytes: int) -> None:
        """Decode one sample of a column to memory of exactly its size."""


class Kernel(Protocol):
    """What both implementations offer. Addresses are those of memory that the caller holds."""

    def collect(
        self, rows: Sequence[Any], names: tuple[str, ...], tensor: type, held: list[Any]
    ) -> list[tuple[Any, list[Cell | None]]] | None:
        """Return of each name the torch dtype (None: no row has it) and a cell for each row.

        Rows are objects or dicts. None where a value is not exactly of type `tensor` with its
        elements in order in CPU memory, or a name has several dtypes. The tensors are appended to
        `held`: cells are addresses in their memory.
        """

    def encode(
        self, samples: int, columns: list[EncodedColumn], tails: int, tail: bytes, extras: bytes
    ) -> bytes:
        """Return the blob of one group; raises EncodeError where it exceeds a limit.

        Raises ValueError where a shape does.
        """

    def parse(self, blob: bytes | memoryview, lookup: Lookup) -> Group:
        """Check a blob in full; raises DecodeError."""

    def extent(
        self, groups: list[Group], indices: list[int]
    ) -> tuple[Shape | None, int, bool, int, Shape | None, int]:
        """Return the shapes of one column of many groups.

        They are: the first shape, the longest first dimension, whether all are alike, the first
        row that differs in more than its first dimension (or -1), its shape, and the first row
        without this column (or -1). `indices` has the column's place in each group, or -1.
        """

    def lengths(self, groups: list[Group], indices: list[int]) -> list[int]:
        """Return the first dimension of each row; 0 where it has none."""

    def fill(
        self,
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
        """Decode a column into padded rows, one a sample.

        A row without this column holds `ones[row]` times the bits `one`; padding has the bits
        `filler`, and stands on the left or on the right.
        """


def _choose() -> tuple[Kernel, str]:
    try:
        compiled: Kernel = import_module("redrb.codec._core")
    except ImportError:
        plain: Kernel = import_module("redrb.codec.plain")
        return plain, "plain Python"
    return compiled, "compiled"


kernel, NAME = _choose()

__all__: Sequence[str] = ["NAME", "Cell", "EncodedColumn", "Group", "Kernel", "Lookup", "kernel"]
