"""`Snapshot`: a copy of the last published state; encodes the difference to the next state."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from redrb.errors import WeightError
from redrb.weights.tensors.state import State
from redrb.weights.wire.chunks import checksum_of
from redrb.weights.wire.delta import Bytes
from redrb.weights.wire.delta_decoding import apply_block
from redrb.weights.wire.delta_encoding import encode_block
from redrb.weights.wire.layout import Layout

CHANGED = "tensors changed while they were published: do not train until publish returns"
"""Message of the errors about checksums that differ between two reads of one tensor."""

_SAMPLED = 8
_THREADS = 4
_FULL_ABOVE = 0.35
"""Share of the state's bytes; a larger delta is not worth its encoding."""
_SAMPLE_MARGIN = 1.5
"""A sample of the chunks may exceed `_FULL_ABOVE` by this factor before the rest is encoded too."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The encoded changes from a snapshot to a state.

    Attributes:
        base: Version of the snapshot.
        blocks: Encoded difference of each chunk, b"" for unchanged chunks.
        checksums: Checksum of each chunk of the state.
    """

    base: int
    blocks: tuple[bytes, ...]
    checksums: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return sum(map(len, self.blocks))


class Snapshot:
    """A copy of the state of one version, on the host."""

    def __init__(
        self, version: int, layout: Layout, checksums: tuple[int, ...], state: State
    ) -> None:
        """Hold the state of `version`, in memory that nothing else writes to."""
        self.version = version
        self.layout = layout
        self.checksums = checksums
        self.state = state

    @classmethod
    def of(
        cls,
        version: int,
        source: State,
        checksums: tuple[int, ...],
        memory_of: Snapshot | None,
    ) -> Snapshot:
        """Copy a state, into the memory of an earlier snapshot if that has the same layout.

        Raises:
            WeightError: There is not enough memory, or the tensors changed since they were sent.
        """
        layout = source.layout
        same = memory_of is not None and memory_of.layout == layout
        state = memory_of.state if memory_of is not None and same else State(layout)
        for index in range(layout.chunks):
            chunk = source.read(index)
            if checksum_of([chunk]) != checksums[index]:
                raise WeightError(CHANGED)
            state.write(index, chunk)
        return cls(version, layout, checksums, state)

    def difference(self, source: State) -> Difference | None:
        """Encode the changes to `source`, in several threads; None if they are too large.

        `source` must have this snapshot's layout. A few chunks are encoded first, to give up early.
        """
        layout = self.layout
        everything = range(layout.chunks)
        sampled = everything[:: max(1, layout.chunks // _SAMPLED)]
        with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as threads:

            def encode(index: int) -> tuple[bytes, int]:
                new = source.read(index)
                block = encode_block(self.state.read(index), new, self.state.runs(index))
                return block, checksum_of([new])

            first = dict(zip(sampled, threads.map(encode, sampled), strict=True))
            seen = sum(layout.size(index) for index in sampled)
            encoded = sum(len(block) for block, _ in first.values())
            if encoded > _FULL_ABOVE * _SAMPLE_MARGIN * seen:
                return None
            rest = [index for index in everything if index not in first]
            first.update(zip(rest, threads.map(encode, rest), strict=True))
        blocks = tuple(first[index][0] for index in everything)
        if sum(map(len, blocks)) > _FULL_ABOVE * layout.nbytes:
            return None
        checksums = tuple(first[index][1] for index in everything)
        return Difference(self.version, blocks, checksums)

    def advance(self, version: int, difference: Difference) -> Snapshot:
        """Apply `difference` to this snapshot's memory; return the snapshot of the new version.

        Raises:
            DecodeError: A block cannot be applied.
        """
        for index, block in enumerate(difference.blocks):
            if block:
                apply_block(self.state.read(index), block, self.state.runs(index))
        return Snapshot(version, self.layout, difference.checksums, self.state)


def joined(blocks: Sequence[bytes], nbytes: int) -> Iterator[list[Bytes]]:
    """Cut the concatenation of `blocks` into pieces of `nbytes`, without copying."""
    piece: list[Bytes] = []
    room = nbytes
    for block in blocks:
        left = np.frombuffer(block, np.uint8)
        while len(left):
            piece.append(left[:room])
            left, room = left[room:], room - len(piece[-1])
            if not room:
                yield piece
                piece, room = [], nbytes
    if piece:
        yield piece
