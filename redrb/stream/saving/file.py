"""Frames of a saved task's file, written and read: see `docs/reference/saved-files.md`.

A file may come from an untrusted source: lengths are checked before memory is allocated for them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import IO, Any, BinaryIO, Final, NamedTuple, NoReturn

import msgspec
import xxhash

from redrb.codec.wire import MAX_BLOB_BYTES
from redrb.errors import DecodeError
from redrb.stream.saving.records import DeadRecord
from redrb.unpacking import unpack

MAGIC: Final = b"RDRBTASK"
VERSION: Final = 2
PREFIX: Final = struct.Struct("<8sHH")
"""Magic, version, flags."""
FRAME: Final = struct.Struct("<BIQ")
"""Kind, bytes of the head, bytes of the payload."""

MAX_HEAD_BYTES: Final = 16 << 20
DIGEST_BYTES: Final = 16
_CHUNK_BYTES: Final = 1 << 20


class Kind(IntEnum):
    """The kind of record in a frame."""

    HEADER = 1
    SOURCES = 2
    REFRESHES = 3
    DEAD_LETTER = 4
    GROUP = 5
    ROWS = 6
    TABLE = 7
    END = 255


class Frame(NamedTuple):
    """One record as it was read; its payload is empty where only its checksum was computed."""

    kind: Kind
    head: Any
    payload: bytes


class SaveWriter:
    """Writes the frames of one file."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._digest = xxhash.xxh3_128()
        self._write(PREFIX.pack(MAGIC, VERSION, 0))

    def dead_letter(self, record: DeadRecord) -> None:
        """Write one dead letter, whose payload is the group."""
        *others, (name, value) = record.fields
        if name == b"g":
            self.write(Kind.DEAD_LETTER, [record.entry_id, others, True], value)
        else:
            self.write(Kind.DEAD_LETTER, [record.entry_id, record.fields, False])

    def end(self, ending: msgspec.Struct) -> None:
        """Write the ending and the checksum of the file."""
        self.write(Kind.END, ending)
        self._file.write(self._digest.digest())

    def write(self, kind: Kind, head: Any, payload: bytes = b"") -> None:
        """Write one record."""
        packed = msgspec.msgpack.encode(head)
        self._write(FRAME.pack(kind, len(packed), len(payload)))
        self._write(packed)
        self._write(payload)

    def _write(self, data: bytes) -> None:
        self._digest.update(data)
        self._file.write(data)


class SaveReader:
    """Reads the frames of one file, in constant memory.

    Attributes:
        checksum: The checksum of the file, in hexadecimal digits, once all frames were read.
    """

    def __init__(self, file: BinaryIO, where: str) -> None:
        """Read magic and version; raises DecodeError for another file or a newer format."""
        self._file = file
        self._where = where
        self._digest = xxhash.xxh3_128()
        self.checksum = ""
        self._left = file.seek(0, 2)
        file.seek(0)
        if self._left < PREFIX.size:
            raise DecodeError(f"{where} is not a saved task: it is too short.")
        magic, version, flags = PREFIX.unpack(self._read(PREFIX.size))
        if magic != MAGIC:
            raise DecodeError(f"{where} is not a saved task: give a file of `redrb save`.")
        if version != VERSION or flags:
            raise DecodeError(
                f"{where} is of format {version}, and this redrb reads format {VERSION}: "
                + (
                    "upgrade redrb."
                    if version > VERSION
                    else "resume it with the redrb of the save."
                )
            )

    def frames(self, *, payloads: bool) -> Iterator[Frame]:
        """Yield all frames, and check the file to its end.

        Args:
            payloads: Whether frames hold their payloads, or only their checksum is computed.
        """
        kind = None
        while kind is not Kind.END:
            if self._left < FRAME.size + DIGEST_BYTES:
                self._damaged("it ends too early")
            number, head_bytes, nbytes = FRAME.unpack(self._read(FRAME.size))
            if number not in set(Kind):
                self._damaged(f"there is no frame of kind {number}")
            kind = Kind(number)
            # a row that was put to often may have more than a group
            if head_bytes > MAX_HEAD_BYTES or (nbytes > MAX_BLOB_BYTES and kind is not Kind.ROWS):
                self._damaged("a frame is too large")
            if head_bytes + nbytes + DIGEST_BYTES > self._left:
                self._damaged("it ends too early")
            head = self._read(head_bytes)
            payload = self._read(nbytes) if payloads else self._skip(nbytes)
            yield Frame(kind, self._unpacked(head), payload)
        if self._left != DIGEST_BYTES or self._file.read(DIGEST_BYTES) != self._digest.digest():
            self._damaged("its checksum is another")
        self.checksum = self._digest.hexdigest()

    def _unpacked(self, head: bytes) -> Any:
        try:
            return unpack(head, "record")
        except DecodeError as error:
            raise DecodeError(f"{self._where} is damaged: {error}") from error

    def _read(self, nbytes: int) -> bytes:
        data = self._file.read(nbytes)
        if len(data) != nbytes:
            self._damaged("it ends too early")
        self._left -= nbytes
        self._digest.update(data)
        return data

    def _skip(self, nbytes: int) -> bytes:
        for begin in range(0, nbytes, _CHUNK_BYTES):
            self._read(min(_CHUNK_BYTES, nbytes - begin))
        return b""

    def _damaged(self, why: str) -> NoReturn:
        raise DecodeError(f"{self._where} is damaged: {why}. Use another copy of it.")
