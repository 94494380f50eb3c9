"""Encoding of deltas: find the changed items of a block, and write gaps and differences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import zstandard

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
    widest,
)

Places: TypeAlias = npt.NDArray[np.intp]
_WORD: Final = 8  # bytes that are compared as one number
_DENSE_SHARE: Final = 0.5  # share of changed items beyond which gaps cost more than they save
_SAMPLE: Final = 1024  # items from which that share is estimated
_LEVEL: Final = 1  # of zstd
_SEARCHED: Final = 1 << 19
"""Bytes that are compared at a time, so that they stay in the processor's cache."""


def encode_block(base: Bytes, new: Bytes, runs: Sequence[Run]) -> bytes:
    """Return the changes that turn `base` into `new`, b"" if they are equal, or raise ValueError.

    Args:
        base: The block that readers have, `uint8 [n]`.
        new: The new block, `uint8 [n]`.
        runs: Runs that cover every byte that may differ; in order, not overlapping.
    """
    if base.size != new.size:
        raise ValueError(f"a base of {base.size} bytes for a block of {new.size}")
    counts: list[int] = []
    gaps: list[Bytes] = []
    planes: list[list[Bytes]] = [[] for _ in range(widest(runs))]
    for run in runs:
        count = _encode_run(items_of(base, run), items_of(new, run), gaps, planes)
        counts.append(count)
    if not any(counts):
        return b""
    compressor = zstandard.ZstdCompressor(
        level=_LEVEL
    )  # one a call, since threads must not share it
    frames = []
    for parts in (gaps, *planes):
        joined = parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else None
        frames.append(b"" if joined is None else compressor.compress(joined.data))
    return b"".join((head_of(runs).pack(FORMAT, *map(len, frames), *counts), *frames))


def _encode_run(old: Items, new: Items, gaps: list[Bytes], planes: list[list[Bytes]]) -> int:
    """Append a run's changes to the streams; return its number of gap bytes for the head."""
    step = old.size // _SAMPLE | 1  # odd, so that it is not in step with the rows of a matrix
    sample = old[::step] != new[::step]
    if np.count_nonzero(sample) > _DENSE_SHARE * sample.size:
        values = np.empty((old.itemsize, old.size), np.uint8)
        for at in range(0, old.size, CACHED_ITEMS):
            piece = slice(at, at + CACHED_ITEMS)
            values[:, piece] = _split(new[piece] - old[piece])
        count = ALL_CHANGED
    else:
        places, differences = _find(old, new)
        if not places.size:
            return 0
        gaps.append(_gaps(places))
        values = _split(differences)
        count = gaps[-1].size
    for plane, part in zip(planes, values, strict=False):
        plane.append(part)
    return count


def _find(old: Items, new: Items) -> tuple[Places, Items]:
    places: list[Places] = [np.empty(0, np.intp)]
    differences: list[Items] = [np.empty(0, old.dtype)]
    for at in range(0, old.size, _SEARCHED // old.itemsize):
        piece = slice(at, at + _SEARCHED // old.itemsize)
        where, what = _find_piece(old[piece], new[piece])
        where += at
        places.append(where)
        differences.append(what)
    return np.concatenate(places), np.concatenate(differences)


def _find_piece(old: Items, new: Items) -> tuple[Places, Items]:
    # words first: in most pieces few words differ, so that few items have to be compared
    shift = (_WORD // old.itemsize).bit_length() - 1
    whole = old.size >> shift << shift
    before, after = old[:whole].view("<u8"), new[:whole].view("<u8")
    words = np.flatnonzero(before != after)
    differences = after.take(words).view(old.dtype) - before.take(words).view(old.dtype)
    inside = np.flatnonzero(differences != 0)
    places = (words << shift).take(inside >> shift)
    places += inside & ((1 << shift) - 1)
    differences = differences.take(inside)
    rest = new[whole:] - old[whole:]
    late = np.flatnonzero(rest)
    if late.size:
        places = np.concatenate([places, late + whole])
        differences = np.concatenate([differences, rest.take(late)])
    return places, differences


def _gaps(places: Places) -> Bytes:
    """Return the gap bytes: the items that are skipped before each place, 255 at a time."""
    skipped = np.diff(places, prepend=-1) - 1
    gaps = skipped.astype(np.uint8)
    far = np.flatnonzero(skipped >= SKIP_ON)
    go_ons = skipped.take(far) // SKIP_ON
    gaps[far] += go_ons.astype(np.uint8)  # modulo 256: the rest of each gap after its 255s
    before = np.repeat(far, go_ons)
    here = np.ones(gaps.size + before.size, np.bool_)
    here[before + np.arange(before.size)] = False
    out = np.full(here.size, SKIP_ON, np.uint8)
    out[here] = gaps
    return out


def _split(differences: Items) -> Bytes:
    """Return the zigzag of `differences` (changed in place) in planes of bytes: `[width, n]`."""
    planes = np.empty((differences.itemsize, differences.size), np.uint8)
    sign = np.negative(differences >> (8 * differences.itemsize - 1))
    differences <<= 1
    differences ^= sign
    for index, plane in enumerate(planes):
        if index:
            differences >>= 8
        np.copyto(plane, differences, casting="unsafe")
    return planes
