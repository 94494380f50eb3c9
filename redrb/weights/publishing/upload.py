"""`Upload`: stores one attempt's chunks and delta pieces, to be committed or to expire."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np
import xxhash

from redrb.connection import Client
from redrb.errors import WeightError
from redrb.keys import WeightKeys
from redrb.weights.publishing.baseline import Anchor, Difference
from redrb.weights.publishing.changes import HEAD_BYTES, changed
from redrb.weights.tensors.state import StateBytes
from redrb.weights.wire import stored_keys
from redrb.weights.wire.calls import Begun
from redrb.weights.wire.chunks import BATCH, KeyUsedError, Outgoing, checksum_of, upload
from redrb.weights.wire.delta import Bytes
from redrb.weights.wire.lora_config import LoraConfig
from redrb.weights.wire.manifest import ChunkSource, Delta, Manifest, pack_hashes

_UPLOADED_S = 600
_SLOWEST_BYTES_PER_S = 10_000_000
"""Uploaded chunks expire after `_UPLOADED_S`, plus the time that they take at this rate."""


class TokenUsedError(WeightError):
    """Another attempt has had this token, which Redis has forgotten, and has left keys."""


class Upload:
    """Uploads one version under a token that no other attempt has.

    Attributes:
        token: Number of the attempt, which is in the names of its keys.
        newest_state: The newest version that is not an adapter, 0 for none.
        is_first: Whether nothing is published yet, or any more.
        is_asked: Whether a reader has asked for a full version.
        nbytes: Size of the state.
    """

    def __init__(
        self, client: Client, keys: WeightKeys, source: StateBytes, version: int, begun: Begun
    ) -> None:
        """Prepare to upload `source`."""
        self.version = version
        self.token = begun.token
        self.newest_state = begun.newest_state
        self.is_first = not begun.newest
        self.is_asked = begun.asked
        self.is_committed = False
        self.nbytes = source.layout.nbytes
        self._spread = stored_keys.spread_of(client)
        self._client = client
        self._keys = keys
        self._source = source
        self._chunks = range(0)
        self._pieces = 0
        self._expire_s = _UPLOADED_S + self.nbytes // _SLOWEST_BYTES_PER_S

    def upload(
        self,
        difference: Difference | None,
        *,
        whole: bool,
        anchor: Anchor | None = None,
        adapter: dict[str, LoraConfig] | None = None,
    ) -> Anchor:
        """Store the difference, the whole state, or both; returns the manifest of the version.

        Args:
            whole: Whether to store the whole state, for readers without the version before.
            anchor: The last version that was stored in full: its chunks are not sent again.
            adapter: Settings of an adapter's layers, if the state is one.

        Raises:
            TokenUsedError: Keys of this attempt exist; `uploaded_keys` does not name them.
        """
        layout = self._source.layout
        delta, known = None, None
        if difference is not None:
            sizes, known = tuple(map(len, difference.blocks)), difference.checksums
            hashes = pack_hashes(self._upload_difference(difference, sum(sizes)))
            packed = struct.pack(f">{len(sizes)}I", *sizes)
            delta = Delta(difference.base, difference.before, packed, self.token, hashes)
        checksums: tuple[int, ...] = known or ()
        sources: tuple[ChunkSource, ...] = ()
        heads: tuple[int, ...] = ()
        if whole:
            if anchor is not None and anchor.manifest.layout != layout:
                anchor = None
            checksums, sources, heads = self._upload_chunks(known, anchor)
        manifest = Manifest(
            version=self.version,
            kind="lora" if adapter is not None else "full" if whole else "delta",
            names=len(layout.tensors),
            nbytes=layout.nbytes,
            chunk_bytes=layout.chunk_bytes,
            layout_id=layout.id,
            tensors=layout.tensors if whole else None,
            checksums=pack_hashes(checksums),
            sources=sources,
            delta=delta,
            base=self.newest_state if adapter is not None else 0,
            spread=self._spread,
            adapter=adapter,
        )
        return Anchor(manifest, heads)

    def uploaded_keys(self) -> list[str]:
        """Return the keys that this attempt may have uploaded."""
        return [*self._chunk_keys(), *self._piece_keys()]

    def _chunk_keys(self) -> Iterator[str]:
        return (self._keys.chunk(self.token, index, self._spread) for index in self._chunks)

    def _piece_keys(self) -> Iterator[str]:
        pieces = range(self._pieces)
        return (self._keys.delta(self.token, number, self._spread) for number in pieces)

    def _upload_chunks(
        self, known: tuple[int, ...] | None, anchor: Anchor | None
    ) -> tuple[tuple[int, ...], tuple[ChunkSource, ...], tuple[int, ...]]:
        source = self._source
        self._chunks = range(source.layout.chunks)
        had = {
            index: run.token
            for run in (anchor.manifest.sources if anchor is not None else ())
            for index in range(run.first, run.first + run.count)
        }
        hashes: list[_Hash] = []
        runs: list[ChunkSource] = []
        pool: list[Bytes] = []  # memory of the chunks of a batch that must be copied

        def outgoing() -> Iterator[Outgoing]:
            slot = 0
            for index in self._chunks:
                segments = source.segments(index)
                if segments is None:
                    size = source.layout.chunk_bytes
                    pool.extend(np.empty(size, np.uint8) for _ in range(BATCH - len(pool)))
                    segments = [source.read(index, pool[slot])]
                checksum = None if known is None else known[index]
                head = checksum_of([part[:HEAD_BYTES] for part in segments[:1]])
                if checksum is None and anchor is not None and head == anchor.heads[index]:
                    checksum = checksum_of(segments)  # the chunk may be unchanged
                same = anchor is not None and checksum == anchor.manifest.checksum(index)
                hashes.append(_Hash(head, checksum))
                token = had[index] if same else self.token
                if runs and runs[-1].token == token:
                    runs[-1] = ChunkSource(token, runs[-1].first, runs[-1].count + 1)
                else:
                    runs.append(ChunkSource(token, index, 1))
                if not same:
                    slot = (slot + 1) % BATCH
                    key = self._keys.chunk(token, index, self._spread)
                    yield Outgoing(key, segments, hashes[-1].update)

        self._store(self._chunk_keys(), outgoing())
        checksums = tuple(chunk.digest() for chunk in hashes)
        return checksums, tuple(runs), tuple(chunk.head for chunk in hashes)

    def _upload_difference(self, difference: Difference, nbytes: int) -> tuple[int, ...]:
        """Store a difference of `nbytes` in pieces; return their checksums."""
        size = self._source.layout.chunk_bytes
        self._pieces = -(-nbytes // size)
        checksums: list[int] = []

        def outgoing() -> Iterator[Outgoing]:
            for number, segments in enumerate(difference.pieces(size)):
                checksums.append(checksum_of(segments))
                yield Outgoing(self._keys.delta(self.token, number, self._spread), segments)

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
            upload(self._client, values, expire_s=self._expire_s)
        except KeyUsedError as error:
            # some keys are of another version: none is deleted, and those of this attempt expire
            self._chunks, self._pieces = range(0), 0
            raise TokenUsedError(
                f"Redis has forgotten that token {self.token} was used, as after a failover "
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
        """Return the checksum, or raise EncodeError."""
        made = self._state.intdigest()
        if self._known is None:
            return made
        if self._sent and made != self._known:
            raise changed("a tensor")
        return self._known
