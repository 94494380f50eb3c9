"""One field of all samples of a call, as one flat array.

Columns are worked on over all groups at once: numpy's cost is a call's, hardly a sample's. What a
group's column becomes depends on that group alone, never on its neighbours in the call.
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
    """Which samples of a call belong together.

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
        """Return the grouping of samples that follow one another."""
        sizes = np.array(counts, dtype=np.int64)
        return cls(np.cumsum(sizes) - sizes, sizes, len(counts) == int(sizes.sum()))

    @staticmethod
    def lone(samples: int) -> Grouping:
        """Return the grouping of samples that are a group each; nobody may write to it."""
        return _lone_grouping(samples)


@dataclass(frozen=True, slots=True)
class Spans:
    """Where samples that follow one another lie in a flat array.

    Attributes:
        starts: Where each begins.
        counts: Elements of each.
        long: Index of those that are long enough for a run.
        first: First element of each of these.
        last: Last element of each of these.
        inward: Each's element that ends the shortest run at its start.
        backward: Each's element that begins the shortest run at its end.
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
        """Return the spans of samples of these lengths; nobody may write to them."""
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
    """One field's values, all samples one after another.

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
        """The elements as integers; any true bool as 1."""
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
