"""One field of all samples of a call as one flat array.

Columns are encoded over all groups at once, because a numpy call costs more than the elements of a
sample. The bytes of a group depend on that group alone, not on its neighbours in the call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from redrb.codec.wire import BOOL, MIN_RUN, DType, Storage, storage_of
from redrb.experience.padding import Shape

Places: TypeAlias = NDArray[np.int64]


@dataclass(slots=True)
class Grouping:
    """Which samples of a call form a group.

    Attributes:
        firsts: Index of each group's first sample.
        counts: Samples of each group, each >= 1.
        alone: Whether every group is one sample.
    """

    firsts: Places
    counts: Places
    alone: bool

    @classmethod
    def of(cls, counts: Sequence[int]) -> Grouping:
        """Return the grouping of consecutive samples, from the size of each group."""
        sizes = np.array(counts, dtype=np.int64)
        return cls(np.cumsum(sizes) - sizes, sizes, len(counts) == int(sizes.sum()))

    @staticmethod
    def lone(samples: int) -> Grouping:
        """Return the grouping of samples that are a group each; it is shared and read-only."""
        return _lone_grouping(samples)


@dataclass(frozen=True, slots=True)
class Spans:
    """Where consecutive samples lie in a flat array.

    Attributes:
        starts: Where each begins.
        counts: Elements of each.
        long: Indices of the samples that are long enough for a run.
        first: First element of each long sample.
        last: Last element of each long sample.
        inward: Last element of the shortest run at the start of each long sample.
        backward: First element of the shortest run at the end of each long sample.
    """

    starts: Places
    counts: Places
    long: Places
    first: Places
    last: Places
    inward: Places
    backward: Places

    @classmethod
    def of(cls, lengths: Sequence[int]) -> Spans:
        """Return the spans of samples of these lengths; they are shared and read-only."""
        counts = np.array(lengths, dtype=np.int64)
        starts = np.cumsum(counts) - counts
        long = np.flatnonzero(counts >= MIN_RUN)
        first, last = starts[long], starts[long] + counts[long] - 1
        arrays = (starts, counts, long, first, last, first + (MIN_RUN - 1), last - (MIN_RUN - 1))
        for array in arrays:
            array.flags.writeable = False
        return cls(*arrays)


@dataclass
class Column:
    """The values of one field, sample after sample.

    Attributes:
        name: The field.
        dtype: The dtype of all its tensors.
        tensor: The elements of all samples, flat, contiguous, on the CPU.
        shapes: Shape of each sample; None where the sample has none.
        shape: The one shape of all samples, or None where they differ.
    """

    name: str
    dtype: DType
    tensor: Tensor
    shapes: Sequence[Shape | None]
    shape: Shape | None

    @cached_property
    def flat(self) -> Storage:
        """The bit patterns of the elements; every true bool is 1."""
        array = storage_of(self.tensor, self.dtype)
        return (array != 0).view(np.uint8) if self.dtype.code == BOOL else array

    @cached_property
    def spans(self) -> Spans:
        """Where each sample lies in `flat`."""
        if self.shape is not None:
            return _even_spans(len(self.shapes), math.prod(self.shape))
        return Spans.of([0 if shape is None else math.prod(shape) for shape in self.shapes])


@lru_cache(maxsize=16)
def _lone_grouping(samples: int) -> Grouping:
    return Grouping.of([1] * samples)


@lru_cache(maxsize=16)
def _even_spans(samples: int, count: int) -> Spans:
    """Return the spans of samples of one length, which many columns share."""
    return Spans.of([count] * samples)
