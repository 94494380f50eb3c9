"""A reader's copy of the state: brought from version to version, and checked at each step."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator

import numpy as np

from redrb.connection import Client
from redrb.errors import DecodeError, WeightCorrupt
from redrb.keys import WeightKeys
from redrb.weights.reading.route import PIN_S, Step
from redrb.weights.state import State
from redrb.weights.wire.chunks import BATCH, Incoming, batches, checksum_of, fetch
from redrb.weights.wire.delta import Bytes, apply_block
from redrb.weights.wire.layout import Layout
from redrb.weights.wire.manifest import Blob, Delta, Manifest, hash_of


class Transfer:
    """Fetches from Redis, and calls `renew` often enough meanwhile."""

    def __init__(self, client: Client, keys: WeightKeys, renew: Callable[[], None]) -> None:
        self._client = client
        self._keys = keys
        self._renew = renew
        self._renewed = time.monotonic()

    def chunks(self, manifest: Manifest, state: State, needed: Collection[int] | None) -> None:
        """Fetch chunks of a whole state, each straight to where it belongs.

        Raises:
            ChunkGoneError, WeightCorrupt, StoreError: As `chunks.fetch` does.
        """
        self._fetch(self._incoming_chunks(manifest, state, needed))
        state.finish()

    def blob(self, manifest: Manifest, blob: Blob, delta: Delta, wanted: range) -> Bytes:
        """Return a delta's blob, of which only the bytes `wanted` are there."""
        data = np.empty(delta.blob_bytes(blob), np.uint8)
        size = manifest.chunk_bytes
        self._fetch(
            Incoming(
                self._keys.delta(blob.token, number, manifest.spread),
                [data[number * size : (number + 1) * size]],
                checksum,
            )
            for number, checksum in enumerate(blob.checksums)
            if number * size < wanted.stop and (number + 1) * size > wanted.start
        )
        return data

    def _fetch(self, values: Iterator[Incoming]) -> None:
        for batch in batches(values):
            fetch(self._client, batch)
            if time.monotonic() - self._renewed > PIN_S / 4:
                self._renew()
                self._renewed = time.monotonic()

    def _incoming_chunks(
        self, manifest: Manifest, state: State, needed: Collection[int] | None
    ) -> Iterator[Incoming]:
        layout = state.layout
        pool: list[Bytes] = []
        gathered = 0
        for run in manifest.sources:
            for index in range(run.first, run.first + run.count):
                if needed is not None and index not in needed:
                    continue
                key = self._keys.chunk(run.token, index, manifest.spread)
                segments = state.segments(index)
                if segments is not None:
                    state.touched(index)
                    yield Incoming(key, segments, manifest.checksums[index])
                    continue
                if not pool:
                    pool = [np.empty(layout.chunk_bytes, np.uint8) for _ in range(BATCH)]
                data = pool[gathered % BATCH][: layout.size(index)]
                gathered += 1
                done = _writing(state, index, data)
                yield Incoming(key, [data], manifest.checksums[index], done)


class Replica:
    """The state of one version in `state`, as far as its chunks are needed.

    Attributes:
        state: The bytes.
        needed: Chunks that are kept up, None for all.
        version: The version, 0 while it is none.
        broken: A step broke off.
    """

    def __init__(self, state: State, needed: Collection[int] | None) -> None:
        """Make a replica of no version yet."""
        self.state = state
        self.needed = needed
        self.version = 0
        self.broken = False
        self._layout_id = 0
        self._checksums: tuple[int, ...] = ()

    @property
    def layout(self) -> Layout:
        """Places of its tensors."""
        return self.state.layout

    def follow(self, step: Step, transfer: Transfer) -> None:
        """Go one step; when it fails, the replica is of no version any more.

        Raises:
            ChunkGoneError: Something was evicted meanwhile.
            WeightCorrupt: Something does not match its checksum.
            StoreError: Redis stayed away.
        """
        manifest = step.manifest
        before, self.version = self.version, 0
        if step.how == "same":
            self._check_same(manifest, before)
        elif step.how == "full":
            self.broken = True
            transfer.chunks(manifest, self.state, self.needed)
        elif manifest.delta is not None:
            self._check_base(manifest, manifest.delta, before)
            self.broken = True
            for blob in manifest.delta.blobs:
                self._apply(manifest, manifest.delta, blob, transfer)
            self.state.finish()
        self.adopt(manifest)

    def adopt(self, manifest: Manifest) -> None:
        """Note that the state is that of a version."""
        self.version = manifest.version
        self.broken = False
        self._layout_id = manifest.layout_id
        self._checksums = manifest.checksums

    def continue_from(self, other: Replica) -> None:
        """Note that the state is what the other replica was."""
        self.version, self.broken = other.version, other.broken
        self._layout_id, self._checksums = other._layout_id, other._checksums

    def _check_same(self, manifest: Manifest, before: int) -> None:
        if (before, self._checksums) != (manifest.version, manifest.checksums):
            raise WeightCorrupt(f"version {manifest.version} is another one than was loaded.")

    def _check_base(self, manifest: Manifest, delta: Delta, before: int) -> None:
        # a server that was emptied counts versions anew: the hash tells one from the other
        fits = delta.base == before and delta.before == hash_of(self._checksums)
        layout = (manifest.layout_id, manifest.nbytes, manifest.chunk_bytes)
        if not fits or layout != (self._layout_id, self.layout.nbytes, self.layout.chunk_bytes):
            raise WeightCorrupt(
                f"the delta to version {manifest.version} does not belong to what was loaded."
            )

    def _apply(self, manifest: Manifest, delta: Delta, blob: Blob, transfer: Transfer) -> None:
        places: dict[int, range] = {}
        end = 0
        for index in range(blob.first, blob.first + blob.count):
            begin, end = end, end + delta.sizes[index]
            if self.needed is None or index in self.needed:
                places[index] = range(begin, end)
        changed = [place for place in places.values() if place]
        wanted = range(changed[0].start, changed[-1].stop) if changed else range(0)
        data = transfer.blob(manifest, blob, delta, wanted)
        for index, place in places.items():
            chunk = self.state.read(index)
            if checksum_of([chunk]) != self._checksums[index]:
                raise WeightCorrupt(
                    f"chunk {index} is not that of version {delta.base} any more: something else "
                    "has changed it."
                )
            if not place:
                if manifest.checksums[index] != self._checksums[index]:
                    raise WeightCorrupt(f"chunk {index} of version {manifest.version} is missing.")
                continue
            try:
                apply_block(chunk, data[place.start : place.stop].data, self.state.runs(index))
            except DecodeError as error:
                raise WeightCorrupt(
                    f"chunk {index} of the delta to version {manifest.version} is damaged: {error}"
                ) from error
            if checksum_of([chunk]) != manifest.checksums[index]:
                raise WeightCorrupt(
                    f"chunk {index} does not have the checksum of version {manifest.version}."
                )
            self.state.write(index, chunk)


def _writing(state: State, index: int, data: Bytes) -> Callable[[], None]:
    return lambda: state.write(index, data)
