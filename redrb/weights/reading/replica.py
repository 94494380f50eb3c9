"""`Replica`: brings a copy of a state from version to version, and checks each step."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial

import numpy as np

from redrb.errors import DecodeError, StoreError, WeightCorrupt
from redrb.keys import WeightKeys
from redrb.weights.reading.catalogue import Pin, Step
from redrb.weights.tensors.state import StateBytes
from redrb.weights.wire.calls import How
from redrb.weights.wire.chunks import BATCH, Incoming, checksum_of
from redrb.weights.wire.delta import Bytes
from redrb.weights.wire.delta_decoding import apply_block
from redrb.weights.wire.layout import Layout
from redrb.weights.wire.manifest import Delta, Manifest, hash_at

_WINDOW_BYTES = 64 << 20
"""Bytes of a delta that are in memory at a time."""


def fetch_chunks(
    pin: Pin, manifest: Manifest, state: StateBytes, needed: Collection[int] | None = None
) -> None:
    """Fetch the needed chunks of a whole state, default all, each straight to its place."""
    pin.fetch(_incoming(pin.catalogue.keys, manifest, state, needed))
    state.finish()


def _incoming(
    keys: WeightKeys, manifest: Manifest, state: StateBytes, needed: Collection[int] | None
) -> Iterator[Incoming]:
    pool: list[Bytes] = []
    gathered = 0
    for run in manifest.sources:
        for index in range(run.first, run.first + run.count):
            if needed is not None and index not in needed:
                continue
            key, checksum = keys.chunk(run.token, index, manifest.spread), manifest.checksum(index)
            segments = state.segments(index)
            if segments is not None:
                state.touched(index)
                yield Incoming(key, segments, checksum)
                continue
            if not pool:
                pool = [np.empty(manifest.chunk_bytes, np.uint8) for _ in range(BATCH)]
            data = pool[gathered % BATCH][: state.layout.size(index)]
            gathered += 1
            yield Incoming(key, [data], checksum, partial(state.write, index, data))


class Replica:
    """The needed chunks of one version's state.

    Attributes:
        needed: Chunks that are kept up to date, None for all.
        manifest: Manifest of its version; None while the state holds none, or a mixture.
        torn: Whether a write to the state was begun since its user has set this to False.
    """

    def __init__(self, state: StateBytes, needed: Collection[int] | None) -> None:
        """Begin without a version."""
        self.state = state
        self.needed = needed
        self.manifest: Manifest | None = None
        self.torn = False

    @property
    def version(self) -> int:
        """The version; 0 for none."""
        return self.manifest.version if self.manifest is not None else 0

    @property
    def layout(self) -> Layout:
        """Layout of the state."""
        return self.state.layout

    def follow(self, step: Step, pin: Pin) -> None:
        """Go one step; if it fails, the replica has no version any more.

        If Redis stays away before the first byte changed, it keeps the version before.
        """
        pin.version = step.manifest.version
        try:
            self._follow(step.manifest, step.how, pin)
        except StoreError:
            raise
        except BaseException:
            self.manifest = None
            raise
        self.manifest = step.manifest

    def _follow(self, manifest: Manifest, how: How, pin: Pin) -> None:
        before = self.manifest
        if how == "same":
            same = (manifest.version, manifest.checksums)
            if before is None or (before.version, before.checksums) != same:
                raise WeightCorrupt(
                    f"version {manifest.version} is not the version of this number that was loaded."
                )
        elif how == "full":
            self._change()
            fetch_chunks(pin, manifest, self.state, self.needed)
        elif manifest.delta is not None:
            delta = manifest.delta
            # an emptied server counts versions from 1 again: the hash distinguishes equal numbers
            if (
                before is None
                or (before.version, before.state_hash) != (delta.base, delta.before)
                or before.layout_id != manifest.layout_id
                or self.layout.nbytes != manifest.nbytes
                or self.layout.chunk_bytes != manifest.chunk_bytes
            ):
                raise WeightCorrupt(
                    f"the delta to version {manifest.version} does not start from the loaded "
                    "version."
                )
            for places in self._windows(delta):
                changed = [place for place in places.values() if place]
                wanted = range(changed[0].start, changed[-1].stop) if changed else range(0)
                data = _fetched_part(pin, manifest, delta, wanted)
                number = wanted.start // manifest.chunk_bytes
                key = pin.catalogue.keys.delta(delta.token, number, manifest.spread)
                self._apply(before, manifest, places, wanted, data, key)
            self.state.finish()

    def _change(self) -> None:
        self.manifest = None
        self.torn = True

    def _windows(self, delta: Delta) -> Iterator[dict[int, range]]:
        """Yield the byte ranges of chunks in a delta, in groups of bounded size."""
        places: dict[int, range] = {}
        first: int | None = None
        end = 0
        for index, size in enumerate(delta.chunk_sizes):
            begin, end = end, end + size
            if self.needed is not None and index not in self.needed:
                continue
            if end > begin and first is None:
                first = begin
            elif end > begin and first is not None and end - first > _WINDOW_BYTES:
                yield places
                places, first = {}, begin
            places[index] = range(begin, end)
        yield places

    def _apply(
        self,
        before: Manifest,
        manifest: Manifest,
        places: dict[int, range],
        wanted: range,
        data: Bytes,
        key: str,
    ) -> None:
        """Change chunks by their parts of a delta: its bytes `wanted` are `data`, from `key` on."""
        self._change()
        for index, place in places.items():
            chunk = self.state.read(index)
            if checksum_of([chunk]) != before.checksum(index):
                raise WeightCorrupt(
                    f"chunk {index} is not that of the version before {manifest.version} any more: "
                    "other code has changed it."
                )
            if not place:
                if manifest.checksum(index) != before.checksum(index):
                    raise WeightCorrupt(
                        f"chunk {index} of version {manifest.version} is missing.", key=key
                    )
                continue
            try:
                block = data[place.start - wanted.start : place.stop - wanted.start]
                apply_block(chunk, block.data, self.state.runs(index))
            except DecodeError as error:
                raise WeightCorrupt(
                    f"chunk {index} of the delta to version {manifest.version} is damaged: {error}",
                    key=key,
                ) from error
            if checksum_of([chunk]) != manifest.checksum(index):
                raise WeightCorrupt(
                    f"chunk {index} does not have the checksum of version {manifest.version}.",
                    key=key,
                )
            self.state.write(index, chunk)


def _fetched_part(pin: Pin, manifest: Manifest, delta: Delta, wanted: range) -> Bytes:
    size, keys = manifest.chunk_bytes, pin.catalogue.keys
    pieces = range(wanted.start // size, -(-wanted.stop // size))
    begin = pieces.start * size
    data = np.empty(min(pieces.stop * size, delta.nbytes) - begin, np.uint8)
    pin.fetch(
        Incoming(
            keys.delta(delta.token, number, manifest.spread),
            [data[number * size - begin : (number + 1) * size - begin]],
            hash_at(delta.checksums, number),
        )
        for number in pieces
    )
    return data[wanted.start - begin : wanted.stop - begin]
