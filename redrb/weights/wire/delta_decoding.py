"""Decoding of deltas: check every number, then apply the changes to a block in place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, Final

import numpy as np
import zstandard

from redrb.errors import DecodeError
from redrb.weights.wire.delta import (
    ALL_CHANGED,
    CACHED_ITEMS,
    FORMAT,
    SKIP_ON,
    Bytes,
    Items,
    Run,
    head_of,
    items_of,
    largest_encoding,
)

_GAPS: Final = 1 << 13
"""Gaps that are followed at a time, so that they stay in the processor's cache."""


def apply_block(block: Bytes, encoded: bytes | memoryview, runs: Sequence[Run]) -> None:
    """Turn the base in `block` into the new version, in place, or raise DecodeError or ValueError.

    All is checked and decompressed before the first byte changes; the runs bound the memory for it,
    whatever the bytes are. The base itself cannot be checked here: compare checksums.

    Args:
        block: The base: `uint8 [n]`.
        encoded: From `encode_block`.
        runs: The runs that the delta was encoded with.
    """
    targets = [items_of(block, run) for run in runs]
    if not encoded:
        return
    counts, frames = _parse(encoded, runs)
    sizes = [0 if count == ALL_CHANGED else count for count in counts]
    gaps = _cut(_decompress(frames[0], sum(sizes)), sizes)
    changes = [
        _RunChanges(target, None if count == ALL_CHANGED else part)
        for count, target, part in zip(counts, targets, gaps, strict=True)
    ]
    for index, frame in enumerate(frames[1:]):
        having = [change for change in changes if change.target.itemsize > index]
        sizes = [change.size for change in having]
        plane = _decompress(frame, sum(sizes))
        for change, part in zip(having, _cut(plane, sizes), strict=True):
            change.planes.append(part)
    for change in changes:
        change.apply()


class _RunChanges:
    """The decoded changes of one run, `size` of whose items change."""

    def __init__(self, target: Items, gaps: Bytes | None) -> None:
        """Check that `gaps` stay inside of `target`; None: all items change."""
        self.target = target
        self.planes: list[Bytes] = []
        self._gaps = gaps
        self.size = target.size if gaps is None else int(np.count_nonzero(gaps != SKIP_ON))
        if gaps is not None and int(gaps.sum(dtype=np.uint64)) + self.size > target.size:
            raise DecodeError(f"delta of items beyond a run of {target.size}.")

    def apply(self) -> None:
        """Change the target."""
        if self._gaps is None:
            for at in range(0, self.size, CACHED_ITEMS):
                piece = slice(at, at + CACHED_ITEMS)
                self.target[piece] += self._differences(piece)
            return
        place, done = -1, 0
        for at in range(0, self._gaps.size, _GAPS):
            gaps = self._gaps[at : at + _GAPS]
            here = gaps != SKIP_ON
            steps = np.cumsum(gaps + here, dtype=np.intp)  # 254 + 1 and 255 + 0 fit into a byte
            steps += place
            places = steps[here]
            self.target[places] += self._differences(slice(done, done + places.size))
            place = steps[-1]
            done += places.size

    def _differences(self, piece: slice) -> Items:
        return _join([plane[piece] for plane in self.planes], self.target.dtype)


def _join(planes: Sequence[Bytes], dtype: np.dtype[Any]) -> Items:
    joined: Items = planes[-1].astype(dtype)
    for plane in planes[-2::-1]:
        joined <<= 8
        joined |= plane
    sign = np.negative(joined & 1)
    joined >>= 1
    joined ^= sign
    return joined


def _parse(
    encoded: bytes | memoryview, runs: Sequence[Run]
) -> tuple[Sequence[int], list[memoryview]]:
    """Return the runs' counts of gaps, and the frames: gaps first, then planes."""
    data = memoryview(encoded)
    head = head_of(runs)
    if data[0] != FORMAT:
        raise DecodeError(
            f"delta of format {data[0]}; this redrb reads format {FORMAT}: update it, or publish "
            "in full."
        )
    if not head.size <= data.nbytes <= largest_encoding(runs):
        raise DecodeError(f"delta of {data.nbytes} bytes: too short or too long for its runs.")
    _, *numbers = head.unpack_from(data)
    frames = len(numbers) - len(runs)
    lengths, counts = numbers[:frames], numbers[frames:]
    ends = list(accumulate(lengths, initial=head.size))
    if ends[-1] != data.nbytes:
        raise DecodeError(f"delta of {data.nbytes} bytes, whose head says {ends[-1]}.")
    for count, run in zip(counts, runs, strict=True):
        if (
            count > run.items and count != ALL_CHANGED
        ):  # each gap byte leads at least one item further
            raise DecodeError(f"delta with {count} gaps for {run.items} items.")
    return counts, [data[start:end] for start, end in pairwise(ends)]


def _cut(stream: Bytes, sizes: Iterable[int]) -> Iterator[Bytes]:
    return (stream[start:end] for start, end in pairwise(accumulate(sizes, initial=0)))


def _decompress(frame: memoryview, size: int) -> Bytes:
    """Return exactly `size` bytes; more are never allocated, whatever the frame says."""
    try:
        declared = zstandard.frame_content_size(frame) if frame.nbytes else 0
        if declared != size or bool(size) != bool(frame.nbytes):
            raise DecodeError(f"delta with a frame of {declared} bytes in place of {size}.")
        if not size:
            return np.empty(0, np.uint8)
        content = zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise DecodeError(f"delta with a damaged frame: {error}") from error
    return np.frombuffer(content, np.uint8)
