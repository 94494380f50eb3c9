"""Chunks on the wire: sent as pieces of live memory, received one by one and checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import redis
import xxhash
from torch import Tensor

from redrb.connection import Client
from redrb.connection.transport import first_error, packed, read_reply
from redrb.errors import WeightCorrupt, WeightError
from redrb.keys import WeightKeys
from redrb.weights.layout import Span
from redrb.weights.manifest import Manifest
from redrb.weights.tensors import byte_view

T = TypeVar("T")
Bytes = npt.NDArray[np.uint8]

BATCH = 16
"""Chunks between two looks at the replies; each batch has the client's whole time for retries."""

_IN_FLIGHT = 3  # replies of one connection that are under way; more of them gain nothing
_SMALL = 64 << 10  # pieces below are joined: a system call costs more than the copy
_CRLF = b"\r\n"


class ChunkGoneError(WeightError):
    """A chunk was evicted while it was fetched."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk about to be sent."""

    key: str
    pieces: list[bytes | memoryview]
    nbytes: int
    checksum: int


def batches(items: Iterator[T]) -> Iterator[list[T]]:
    """Cut `items` into lists of `BATCH`, the last one shorter."""
    while batch := list(islice(items, BATCH)):
        yield batch


class Cutter:
    """Cuts the concatenation of tensors into the bytes of chunks, without joining them."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._name = ""
        self._flat: Tensor | None = None

    def cut(self, key: str, spans: Sequence[Span], nbytes: int) -> Chunk:
        """Return the chunk of `nbytes` bytes that `spans` describe, padded with zeros."""
        pieces: list[bytes | memoryview] = []
        small = bytearray()
        checksum = xxhash.xxh3_64()
        end = 0
        for span in spans:
            small += bytes(span.in_chunk - end)
            end = span.in_chunk + span.nbytes
            piece = self._bytes(span)
            if span.nbytes < _SMALL:
                small += piece
                continue
            if small:
                pieces.append(bytes(small))
                small.clear()
            pieces.append(piece)
        small += bytes(nbytes - end)
        if small:
            pieces.append(bytes(small))
        for part in pieces:
            checksum.update(part)
        return Chunk(key, pieces, nbytes, checksum.intdigest())

    def _bytes(self, span: Span) -> memoryview:
        # spans come in the order of tensors: a strided one is copied once, then dropped
        if self._flat is None or self._name != span.name:
            self._name, self._flat = span.name, byte_view(self._tensors[span.name])
        part = self._flat[span.in_tensor : span.in_tensor + span.nbytes]
        view: memoryview = part.cpu().numpy().data
        return view


def stage(client: Client, chunks: Sequence[Chunk], *, expire_s: int) -> None:
    """Store chunks that vanish after `expire_s` seconds unless they are made permanent.

    Raises:
        StoreError: Redis refused one, or stayed away.
    """
    tail = _CRLF + packed("EX", expire_s)
    parts: list[bytes | memoryview] = []
    for chunk in chunks:
        parts.append(b"*5\r\n%b$%d\r\n" % (packed("SET", chunk.key), chunk.nbytes))
        parts += chunk.pieces
        parts.append(tail)

    def attempt() -> None:
        with client.connection() as connection:
            _send(connection, parts)
            replies = [read_reply(connection) for _ in chunks]
        error = first_error(replies)
        if error is not None:
            raise error

    client.retrying(attempt)


def _send(connection: Any, parts: Sequence[bytes | memoryview]) -> None:
    connection.send_packed_command(parts)


class Filler:
    """Fetches chunks of a version, checks each, and fills tensors with them."""

    def __init__(
        self, client: Client, keys: WeightKeys, manifest: Manifest, tensors: Mapping[str, Tensor]
    ) -> None:
        self._client = client
        self._keys = keys
        self._manifest = manifest
        owners = {entry.name: entry.alias or entry.name for entry in manifest.layout.tensors}
        flat = {owners[name]: byte_view(tensor).numpy() for name, tensor in tensors.items()}
        self._flat: Mapping[str, Bytes] = flat
        self._spans = manifest.layout.spans()

    def fill(self) -> None:
        """Fetch every chunk that one of the tensors lies in.

        Raises:
            ChunkGoneError: A chunk is not there any more.
            WeightCorrupt: A chunk has another checksum or size than the manifest says.
            StoreError: Redis stayed away.
        """
        needed = (
            index
            for index, spans in enumerate(self._spans)
            if any(span.name in self._flat for span in spans)
        )
        for batch in batches(needed):
            self._client.retrying(self._fetching(batch))

    def _fetching(self, indices: Sequence[int]) -> Callable[[], None]:
        def attempt() -> None:
            with self._client.connection() as connection:
                asked = 0
                for received, index in enumerate(indices):
                    while asked < len(indices) and asked - received < _IN_FLIGHT:
                        self._ask(connection, indices[asked])
                        asked += 1
                    self._take(index, read_reply(connection))

        return attempt

    def _ask(self, connection: redis.Connection, index: int) -> None:
        manifest = self._manifest
        key = self._keys.chunk(manifest.token, manifest.version, index)
        # one byte more than there may be: a value of another size shows, and a huge one stays there
        command = packed("GETRANGE", key, 0, manifest.layout.size(index))
        _send(connection, [b"*4\r\n" + command])

    def _take(self, index: int, reply: object) -> None:
        if isinstance(reply, Exception):
            raise reply
        manifest = self._manifest
        if not isinstance(reply, bytes) or not reply:
            raise ChunkGoneError(
                f"chunk {index} of version {manifest.version} is not there any more."
            )
        checksum = manifest.checksums[index]
        if len(reply) != manifest.layout.size(index) or xxhash.xxh3_64_intdigest(reply) != checksum:
            raise WeightCorrupt(
                f"chunk {index} of version {manifest.version} does not match its checksum. Nothing "
                "was loaded. Publish a new version; see who else writes to "
                f"{self._keys.chunk(manifest.token, manifest.version, index)}."
            )
        data = np.frombuffer(reply, np.uint8)
        for span in self._spans[index]:
            flat = self._flat.get(span.name)
            if flat is not None:
                piece = data[span.in_chunk : span.in_chunk + span.nbytes]
                flat[span.in_tensor : span.in_tensor + span.nbytes] = piece
