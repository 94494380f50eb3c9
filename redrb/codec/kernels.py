"""The codec's inner loops: compiled where that was possible, in plain Python elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple, Protocol, TypeAlias

from redrb.codec.core import compiled

Shape: TypeAlias = tuple[int, ...]
Cell: TypeAlias = tuple[int, Shape] | tuple[int, Shape, int]
"""Address and shape of one sample's elements; then, of rounded floats, the address of these."""

EncodedColumn: TypeAlias = tuple[bytes, int, int, list[Cell | None], bool]
"""Packed key of the field in the schema, code of its dtype, code of its wire dtype (-1: the
narrowest that loses nothing), a cell for each sample, and whether `Kernel.encode` checks that its
numbers are finite."""

Lookup: TypeAlias = Callable[[bytes], tuple[tuple[Any, ...], bytes]]
"""From a schema's bytes to its fields, and two bytes for each: codes of dtype and wire dtype."""


Piece: TypeAlias = tuple[Shape, int, int, int, int, int]
"""One sample of one column: its shape, stored elements, lead, its value, trail, its value."""


class Columns(NamedTuple):
    """The columns of one group, collected by the kernel, which holds their tensors.

    Attributes:
        memory: Where they lie, as `Kernel.encode` takes it once.
        sound: Whether the kernel found that the samples are as `check_groups` wants them; what it
            does not know, `check_groups` does.
        even: Whether each sample has all fields that any sample has, masks aside.
        oldest: The oldest version >= 0 in `token_versions`.
    """

    memory: object
    sound: bool
    even: bool
    oldest: int | None


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

    def pieces(self, column: int) -> list[Piece | None]:
        """Return each sample of a column; None where a sample has none."""

    def read(self, column: int, sample: int, address: int, nbytes: int) -> None:
        """Decode one sample of a column to memory of exactly its size."""


class Kernel(Protocol):
    """What both implementations offer. Addresses are those of memory that the caller holds."""

    def collect(
        self,
        samples: tuple[Any, ...],
        tables: tuple[Any, ...],
        names: tuple[str, ...],
        keys: tuple[bytes, ...],
        rules: bytes,
        tensor: type,
        exchange: Any,
    ) -> tuple[object, bool, bool, int | None] | None:
        """Return the columns of a group in one pass over its samples.

        Standard fields are attributes of a sample and come first in `names`, further ones entries
        of its table. None where a value is not exactly of type `tensor` with its elements in order
        in CPU memory, a field has several dtypes, or a limit of the format is exceeded: such groups
        are collected in Python, which says what is wrong.

        Args:
            samples: Samples of one group.
            tables: The further tensors of each sample.
            names: Names of the fields.
            keys: The packed key of each in the schema.
            rules: Four bytes for each standard field: least and most dimensions; whether it
                describes actions, not tokens; 1 for integers, 2 for finite, 4 for tokens' versions,
                8 for a field that samples may lack, 16 for one that `encode` checks.
            tensor: The type of tensors.
            exchange: The tensors' `__dlpack_c_exchange_api__`.
        """

    def encode(
        self,
        samples: int,
        columns: object,
        tails: int,
        tail: bytes,
        extras: bytes,
    ) -> tuple[bytes, bool]:
        """Return the blob of one group, and whether all floats in columns to check are finite.

        The floats are checked as they are copied. Columns are a list of `EncodedColumn`, or what
        `collect` found. Raises EncodeError where the blob exceeds a limit.

        Raises ValueError where a shape does, or where collected columns are encoded again.
        """

    def parse(self, blob: bytes | memoryview, lookup: Lookup) -> Group:
        """Check a blob in full; raises DecodeError."""

    def extent(self, groups: tuple[Group, ...], places: bytes) -> tuple[Shape, int, bool] | None:
        """Return the shapes of one column of many groups.

        They are: the first shape, the longest first dimension, and whether all are alike. None
        where a row lacks the column, or differs in more than its first dimension.

        Args:
            groups: The groups.
            places: The column's place in each group; NOWHERE in groups without it.
        """

    def fill(
        self,
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


NOWHERE = 255
"""Stands for the place of a column in a group that lacks it."""

kernel: Kernel = import_module("redrb.codec.plain") if compiled is None else compiled
