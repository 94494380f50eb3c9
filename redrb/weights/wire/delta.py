"""Deltas: the changes between two versions of a block of weights, without loss, in few bytes.

An optimizer step leaves most published weights as they are and moves the others by a unit or two in
the last place. So a delta holds the gaps between changed items, and the differences of their bit
patterns, read as integers. `docs/weight-delta.md` describes the bytes.

numpy and zstd do the work on whole arrays and release the GIL, so that threads run in parallel.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import zstandard

from redrb.errors import DecodeError

if TYPE_CHECKING:
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
    """Return the differences from their planes; the inverse of `_split`."""
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
    """Yield the parts of a stream, of these sizes."""
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
    """Return places and differences of the changed items."""
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
