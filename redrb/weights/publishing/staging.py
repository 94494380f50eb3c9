"""Staging: one attempt's chunks and delta pieces are stored, to be committed or to expire."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import xxhash

from redrb.connection import Client
from redrb.errors import EncodeError, WeightError
from redrb.keys import WeightKeys
from redrb.weights.publishing.snapshot import CHANGED, Difference, joined
from redrb.weights.tensors.state import State
from redrb.weights.wire import stored_keys
from redrb.weights.wire.chunks import BATCH, KeyUsedError, Outgoing, checksum_of, stage
from redrb.weights.wire.delta import Bytes
from redrb.weights.wire.layout import Layout
from redrb.weights.wire.manifest import Manifest, Source

_HEAD = 64 << 10
"""First bytes of a chunk, whose checksum finds most changed chunks without hashing all bytes."""
_STAGING_S = 600
_SLOWEST_BYTES_PER_S = 10_000_000
"""Staged chunks expire after `_STAGING_S`, plus the time that they take at this rate."""


class TokenUsedError(WeightError):
    """Another attempt has had this token, which Redis has forgotten, and has left keys."""


@dataclass(frozen=True, slots=True)
class StagingPlace:
    """Where a version goes.

    Attributes:
        version: The version.
        token: Number of the attempt, which is in the names of its keys.
        spread: Slots of a cluster that keys are spread over, else 0.
    """

    version: int
    token: int
    spread: int = 0


@dataclass(frozen=True, slots=True)
class StagedVersion:
    """A version that was staged.

    Attributes:
        place: Where it is.
        layout: Layout of the tensors.
        checksums: Checksum of each chunk.
        sources: Keys of the chunks, if they are staged.
        sizes: Bytes of each chunk's difference, if a delta is staged.
        pieces: Checksums of the delta's pieces.
        heads: Checksum of each chunk's first bytes, if chunks are staged.
    """

    place: StagingPlace
    layout: Layout
    checksums: tuple[int, ...]
    sources: tuple[Source, ...] = ()
    sizes: tuple[int, ...] | None = None
    pieces: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Anchor:
    """A version that is stored in full, whose chunks need not be sent again.

    Attributes:
        manifest: Manifest of the version.
        staged: As it was staged.
    """

    manifest: Manifest
    staged: StagedVersion


class StagingAttempt:
    """Stages one version under a token that no other attempt has."""

    def __init__(
        self, client: Client, keys: WeightKeys, place: StagingPlace, source: State
    ) -> None:
        """Prepare to stage `source`."""
        self._client = client
        self._keys = keys
        self._source = source
        self._pool: list[Bytes] = []
        self._chunks = range(0)
        self._pieces = 0
        self._expire_s = _STAGING_S + source.layout.nbytes // _SLOWEST_BYTES_PER_S
        self.place = place

    def stage(
        self, difference: Difference | None, *, whole: bool, anchor: Anchor | None = None
    ) -> StagedVersion:
        """Store the difference, the whole state, or both.

        Args:
            difference: Difference from the version before.
            whole: Whether to store the whole state, for readers without the version before.
            anchor: The last version that was stored in full: its chunks are not sent again.

        Raises:
            TokenUsedError: Keys of this attempt exist; `staged_keys` does not name them.
        """
        layout = self._source.layout
        sizes: tuple[int, ...] | None = None
        pieces: tuple[int, ...] = ()
        if difference is not None:
            sizes = tuple(map(len, difference.blocks))
            pieces = self._stage_difference(difference)
        if not whole and difference is not None:
            return StagedVersion(self.place, layout, difference.checksums, (), sizes, pieces)
        known = None if difference is None else difference.checksums
        if anchor is not None and anchor.staged.layout != layout:
            anchor = None
        checksums, sources, heads = self._stage_chunks(known, anchor)
        return StagedVersion(self.place, layout, checksums, sources, sizes, pieces, heads)

    def staged_keys(self) -> list[str]:
        """Return the keys that this attempt may have staged."""
        return [*self._chunk_keys(), *self._piece_keys()]

    def _chunk_keys(self) -> Iterator[str]:
        token, spread = self.place.token, self.place.spread
        return (self._keys.chunk(token, index, spread) for index in self._chunks)

    def _piece_keys(self) -> Iterator[str]:
        token, spread = self.place.token, self.place.spread
        return (self._keys.delta(token, number, spread) for number in range(self._pieces))

    def _stage_chunks(
        self, known: tuple[int, ...] | None, anchor: Anchor | None
    ) -> tuple[tuple[int, ...], tuple[Source, ...], tuple[int, ...]]:
        layout, place = self._source.layout, self.place
        self._chunks = range(layout.chunks)
        had = {
            index: run.token
            for run in (anchor.manifest.sources if anchor is not None else ())
            for index in range(run.first, run.first + run.count)
        }
        hashes: list[_Hash] = []
        tokens: list[int] = []

        def outgoing() -> Iterator[Outgoing]:
            slot = 0
            for index in self._chunks:
                segments = self._segments(index, slot)
                checksum = None if known is None else known[index]
                head = checksum_of([part[:_HEAD] for part in segments[:1]])
                if checksum is None and anchor is not None and head == anchor.staged.heads[index]:
                    checksum = checksum_of(segments)  # the chunk may be unchanged
                same = anchor is not None and checksum == anchor.staged.checksums[index]
                hashes.append(_Hash(head, checksum))
                tokens.append(had[index] if same else place.token)
                if not same:
                    slot = (slot + 1) % BATCH
                    key = self._keys.chunk(place.token, index, place.spread)
                    yield Outgoing(key, segments, hashes[-1].update)

        self._store(self._chunk_keys(), outgoing())
        checksums = tuple(chunk.digest() for chunk in hashes)
        return checksums, _sources(tokens), tuple(chunk.head for chunk in hashes)

    def _segments(self, number: int, slot: int) -> list[Bytes]:
        """Return a chunk's bytes; if they must be copied, in one of `BATCH` slots of memory."""
        segments = self._source.segments(number)
        if segments is not None:
            return segments
        if not self._pool:
            size = self._source.layout.chunk_bytes
            self._pool = [np.empty(size, np.uint8) for _ in range(BATCH)]
        return [self._source.read(number, self._pool[slot])]

    def _stage_difference(self, difference: Difference) -> tuple[int, ...]:
        size, place = self._source.layout.chunk_bytes, self.place
        self._pieces = -(-difference.nbytes // size)
        checksums: list[int] = []

        def outgoing() -> Iterator[Outgoing]:
            for number, segments in enumerate(joined(difference.blocks, size)):
                checksums.append(checksum_of(segments))
                yield Outgoing(self._keys.delta(place.token, number, place.spread), segments)

        self._store(self._piece_keys(), outgoing())
        return tuple(checksums)

    def _store(self, names: Iterator[str], values: Iterator[Outgoing]) -> None:
        """Store values, none of whose keys may exist.

        All keys are looked at first, so that nothing is stored if a version has them. A key that
        appears after that is noticed when its value is stored.
        """
        try:
            if stored_keys.count_existing(self._client, names):
                raise KeyUsedError("keys of this token exist already.")
            stage(self._client, values, expire_s=self._expire_s)
        except KeyUsedError as error:
            # some keys are of another version: none is deleted, and those of this attempt expire
            self._chunks, self._pieces = range(0), 0
            raise TokenUsedError(
                f"Redis has forgotten that token {self.place.token} was used, as after a failover "
                "that lost its last writes. Nothing was published: publish again."
            ) from error


class _Hash:
    """A chunk's checksum: known before, or computed while the chunk is sent."""

    def __init__(self, head: int, known: int | None) -> None:
        self.head = head
        self._known = known
        self._sent = False
        self._state = xxhash.xxh3_64()

    def update(self, data: memoryview) -> None:
        """Hash the next bytes of the chunk."""
        self._state.update(data)
        self._sent = True

    def digest(self) -> int:
        """Return the checksum.

        Raises:
            EncodeError: The bytes that were sent have another checksum than the known one.
        """
        made = self._state.intdigest()
        if self._known is None:
            return made
        if self._sent and made != self._known:
            raise EncodeError(f"{CHANGED}. Nothing was published.")
        return self._known


def _sources(tokens: list[int]) -> tuple[Source, ...]:
    """Return runs of chunks whose keys have the same token."""
    runs: list[Source] = []
    for index, token in enumerate(tokens):
        if runs and runs[-1].token == token:
            runs[-1] = Source(token, runs[-1].first, runs[-1].count + 1)
        else:
            runs.append(Source(token, index, 1))
    return tuple(runs)
