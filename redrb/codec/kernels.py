"""The codec's inner loops: compiled where that was possible, in plain Python elsewhere."""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

Shape: TypeAlias = tuple[int, ...]
Cell: TypeAlias = tuple[int, Shape] | tuple[int, Shape, int]
"""Address and shape of one sample's elements; then, of rounded floats, the address of these."""

EncodedColumn: TypeAlias = tuple[bytes, int, int, list[Cell | None], bool]
"""Packed key of the field in the schema, code of its dtype, code of its wire dtype (-1: the
narrowest that loses nothing), a cell for each sample, and whether `Kernel.encode` checks that its
numbers are finite."""


Piece: TypeAlias = tuple[Shape, int, int, int, int, int]
"""One sample of one column: its shape, stored elements, lead, its value, trail, its value."""


class Columns(NamedTuple):
    """The columns of one group, collected by the kernel, which holds their tensors.

    Attributes:
        memory: Where they lie, as `Kernel.encode` takes it once.
        sound: Whether the kernel found that the samples are as `check_groups` wants them; what it
            does not know, `check_groups` does.
        even: Whether each sample has all fields that any sample has, masks aside.
        oldest, newest: The oldest and the newest version >= 0 in `token_versions`.
    """

    memory: object
    sound: bool
    even: bool
    oldest: int | None
    newest: int | None


class Group(Protocol):
    """One blob, checked in full.

    Attributes:
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


NOWHERE = 255
"""Stands for the place of a column in a group that lacks it."""

INTERFACE: Final = 8
"""Number of the functions' signatures: a core that an older version compiled is not used."""


def load() -> tuple[Any, str]:
    """Return the compiled core, or None, and the name of the kernel that runs.

    Without a core the plain kernel runs, as after an installation without a compiler. A core that
    is there and cannot be used is a fault of the installation, and makes the codec several times
    slower: this warns, and the name has the reason.
    """
    try:
        core = import_module("redrb.codec._core")
    except ModuleNotFoundError:
        return None, "plain Python"
    except ImportError as error:
        reason = str(error)
    else:
        if core.INTERFACE == INTERFACE:
            return core, "compiled"
        reason = f"the compiled core has interface {core.INTERFACE}, redrb needs {INTERFACE}"
    warnings.warn(
        f"redrb's codec runs in plain Python, which is slow: {reason}. Reinstall redrb.",
        RuntimeWarning,
        stacklevel=2,
    )
    return None, f"plain Python, because {reason}: reinstall redrb"


compiled, NAME = load()
"""The compiled core or None; the name of the kernel that runs."""

kernel: Any = import_module("redrb.codec.plain") if compiled is None else compiled
"""`collect`, `encode`, `parse`, `extent`, `fill` and `gather`.

`redrb.codec.plain` has and describes them. Addresses are those of memory that the caller holds.
"""
