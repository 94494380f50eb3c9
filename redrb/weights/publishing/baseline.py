"""`Baseline`: the last published state and the last full version, from which the next starts."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from redrb.errors import WeightError
from redrb.weights.publishing.changes import changed
from redrb.weights.tensors.state import StateBytes
from redrb.weights.wire.chunks import checksum_of
from redrb.weights.wire.delta import Bytes
from redrb.weights.wire.delta_decoding import apply_block
from redrb.weights.wire.delta_encoding import encode_block
from redrb.weights.wire.manifest import Manifest

_SAMPLED = 8
_THREADS = 4
_FULL_ABOVE = 0.35
"""Share of the state's bytes; a larger delta is not worth its encoding."""
_SAMPLE_MARGIN = 1.5
"""A sample of the chunks may exceed `_FULL_ABOVE` by this factor before the rest is encoded too."""

_log = logging.getLogger("redrb")


@dataclass(frozen=True, slots=True)
class Difference:
    """The encoded changes from the baseline to a state.

    Attributes:
        before: Hash of its checksums.
        blocks: Encoded difference of each chunk, b"" for unchanged chunks.
        checksums: Checksum of each chunk of the state.
    """

    base: int
    before: int
    blocks: tuple[bytes, ...]
    checksums: tuple[int, ...]

    def pieces(self, nbytes: int) -> Iterator[list[Bytes]]:
        """Cut all blocks, one after another, into pieces of `nbytes`, without copying."""
        piece: list[Bytes] = []
        room = nbytes
        for block in self.blocks:
            left = np.frombuffer(block, np.uint8)
            while len(left):
                piece.append(left[:room])
                left, room = left[room:], room - len(piece[-1])
                if not room:
                    yield piece
                    piece, room = [], nbytes
        if piece:
            yield piece


class Anchor(NamedTuple):
    """A version that is stored in full, whose chunks need not be sent again.

    Attributes:
        heads: Checksum of each chunk's first bytes.
    """

    manifest: Manifest
    heads: tuple[int, ...]


class Baseline:
    """A copy of the last published state, on the host, and the last full version.

    Attributes:
        anchor: The last version that was stored in full.
    """

    def __init__(self, *, deltas: bool, anchor_every: int) -> None:
        self._deltas = deltas
        self._anchor_every = anchor_every
        self._since_anchor = 0
        self._state: StateBytes | None = None
        self._manifest: Manifest | None = None  # of the state, unless that is a mixture
        self._copied: Manifest | None = None  # of the state, if that is to be committed
        self.anchor: Anchor | None = None

    @property
    def state(self) -> StateBytes | None:
        """The state of the last published version; None if no copy is kept."""
        return None if self._manifest is None else self._state

    def stores_in_full(self, difference: Difference | None) -> bool:
        """Return whether the next version is stored in full; `difference` leads to it.

        At least every `anchor_every` versions one is, so that readers that join need few deltas.
        """
        return difference is None or self._since_anchor + 1 >= self._anchor_every

    def difference(self, source: StateBytes, newest: int) -> Difference | None:
        """Encode the changes from version `newest`, in several threads.

        Returns None if that version is not known, or the changes are too large; a few chunks are
        encoded first, to give up early.
        """
        state, before, layout = self._state, self._manifest, source.layout
        if state is None or before is None or before.version != newest or state.layout != layout:
            return None
        everything = range(layout.chunks)
        sampled = everything[:: max(1, layout.chunks // _SAMPLED)]
        with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as threads:

            def encode(index: int) -> tuple[bytes, int]:
                new = source.read(index)
                checksum = checksum_of([new])  # first: what changes after it is noticed
                return encode_block(state.read(index), new, state.runs(index)), checksum

            found = dict(zip(sampled, threads.map(encode, sampled), strict=True))
            seen = sum(layout.size(index) for index in sampled)
            encoded = sum(len(block) for block, _ in found.values())
            if encoded > _FULL_ABOVE * _SAMPLE_MARGIN * seen:
                return None
            rest = [index for index in everything if index not in found]
            found.update(zip(rest, threads.map(encode, rest), strict=True))
        blocks = tuple(found[index][0] for index in everything)
        if sum(map(len, blocks)) > _FULL_ABOVE * layout.nbytes:
            return None
        checksums = tuple(found[index][1] for index in everything)
        return Difference(newest, before.state_hash, blocks, checksums)

    def copy(self, source: StateBytes, manifest: Manifest) -> None:
        """Copy a state that was sent in full, before it is committed, and check what was sent.

        Raises:
            EncodeError: The state has changed since.
        """
        self._manifest = None
        if not self._deltas:
            return
        try:
            if self._state is None or self._state.layout != source.layout:
                self._state = None  # its memory is freed first
                self._state = StateBytes(source.layout)
        except WeightError as error:  # the version is published all the same
            _log_no_copy(manifest, error)
            return
        for index in range(source.layout.chunks):
            chunk = source.read(index)
            if checksum_of([chunk]) != manifest.checksum(index):
                raise changed("a tensor")
            self._state.write(index, chunk)
        self._copied = manifest

    def advance(self, uploaded: Anchor, difference: Difference | None) -> None:
        """Make a committed version the baseline: the state that was copied, or `difference`."""
        manifest, copied = uploaded.manifest, self._copied
        whole = manifest.kind == "full"
        self._since_anchor = 0 if whole else self._since_anchor + 1
        if whole:
            self.anchor = uploaded
        self._manifest = self._copied = None
        if difference is None:
            self._manifest = manifest if copied is manifest else None
        elif self._state is not None:
            try:
                for index, block in enumerate(difference.blocks):
                    if block:
                        apply_block(self._state.read(index), block, self._state.runs(index))
            except MemoryError as error:
                _log_no_copy(manifest, error)
            else:
                self._manifest = manifest

    def forget(self) -> None:
        """Forget the baseline: the next version is sent in full, with all its chunks."""
        self._manifest = self.anchor = None


def _log_no_copy(manifest: Manifest, error: Exception) -> None:
    _log.warning(
        "weights: no copy of version %d is kept, so the next version is sent in full: %s",
        manifest.version,
        error,
    )
