"""Deltas: the changes between two versions of a block of weights, without loss, in few bytes.

An optimizer step leaves most published weights as they are and moves the others by a unit or two in
the last place. So a delta holds the gaps between changed items, and the differences of their bit
patterns, read as integers. `docs/reference/weight-format.md` describes the bytes.

numpy and zstd do the work on whole arrays and release the GIL, so that threads run in parallel.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

if TYPE_CHECKING:  # commands that list weights start without numpy
    import numpy as np
    import numpy.typing as npt

Bytes: TypeAlias = "npt.NDArray[np.uint8]"
Items: TypeAlias = "npt.NDArray[np.unsignedinteger[Any]]"

FORMAT: Final = 1
_WIDTHS: Final = (1, 2, 4, 8)
SKIP_ON: Final = 255  # as a gap: skip 255 items, none of which changes
ALL_CHANGED: Final = 0xFFFF_FFFF  # instead of a count of gaps
CACHED_ITEMS: Final = 1 << 15
"""Items that are worked on at a time, so that they stay in the processor's cache."""


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive items of one width inside a block.

    Attributes:
        start: Byte offset in the block, a multiple of `width`.
        nbytes: Bytes of the run, a multiple of `width`.
        width: Bytes of an item: 1, 2, 4 or 8.
    """

    start: int
    nbytes: int
    width: int

    def __post_init__(self) -> None:
        if self.width not in _WIDTHS or self.start < 0 or self.nbytes < 0:
            raise ValueError(f"{self}: items have 1, 2, 4 or 8 bytes, and places begin at 0")
        if self.start % self.width or self.nbytes % self.width:
            raise ValueError(f"{self} begins or ends inside an item")

    @property
    def items(self) -> int:
        """Number of items."""
        return self.nbytes // self.width


def largest_encoding(runs: Sequence[Run]) -> int:
    """Return the largest number of bytes that an encoding of these runs may have."""
    items = sum(run.items for run in runs)
    content = items + sum(run.nbytes for run in runs)
    # the last two terms: zstd's overhead for content that it cannot compress
    return head_of(runs).size + content + content // 256 + 64 * (1 + widest(runs))


def head_of(runs: Sequence[Run]) -> struct.Struct:
    """Return the layout of a delta's head: format, lengths of frames, gap bytes of runs."""
    return struct.Struct(f"<B{1 + widest(runs)}I{len(runs)}I")


def widest(runs: Sequence[Run]) -> int:
    """Return the bytes of the widest items, which is the number of planes."""
    return max((run.width for run in runs), default=0)


def items_of(block: Bytes, run: Run) -> Items:
    """Return a run's items as unsigned integers, a view of the block."""
    if run.start + run.nbytes > block.size:
        raise ValueError(f"{run} reaches beyond the block of {block.size} bytes")
    items: Items = block[run.start : run.start + run.nbytes].view(f"<u{run.width}")
    return items
