"""A buffer of a host cache: a file in shared memory that is complete, or known not to be."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from redrb.errors import WeightError
from redrb.weights.wire.manifest import MAX_VERSION

Bytes = npt.NDArray[np.uint8]

HEADER_BYTES = 48
"""Size of the header."""

MAX_META = 256 << 20
"""Bytes of meta that a buffer may have."""

PAGE = 4096
"""Where the data begin."""

_MAGIC = b"redrbHC1"
_MADV_POPULATE_WRITE = 23  # Linux 5.14; the module mmap does not name it
_POPULATED = 4 << 20
_FIELDS = struct.Struct("<8s4Q")  # magic, version, nbytes, meta's size and xxh3
_CHECKSUM = struct.Struct("<Q")  # xxh3 of the fields
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW


@dataclass(frozen=True, slots=True)
class Header:
    """The first bytes of a buffer. Version 0: nothing in it is usable."""

    version: int
    nbytes: int
    meta_nbytes: int = 0
    meta_checksum: int = 0

    def packed(self) -> bytes:
        """Return the bytes of it."""
        fields = _FIELDS.pack(
            _MAGIC, self.version, self.nbytes, self.meta_nbytes, self.meta_checksum
        )
        return fields + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields))


_NOTHING = Header(0, -1)


class Buffer:
    """A file: a page with the header, the data, then from a new page the meta.

    Only who has its lock exclusively changes it. The header may be read without the lock: one that
    is half written does not match its checksum.
    """

    def __init__(self, path: Path, lock: Path) -> None:
        self.path = path
        self.lock = lock
        self._map: tuple[int, mmap.mmap] | None = None

    @property
    def is_mapped(self) -> bool:
        """Whether this process has it mapped for writing."""
        return self._map is not None

    def header(self) -> Header:
        """Read the header; version 0 when there is no such file, or it is damaged."""
        try:
            with self._opened(os.O_RDONLY) as descriptor:
                self._kept(descriptor)
                return _read_header(descriptor)
        except FileNotFoundError:
            self._map = None
            return _NOTHING

    def read(self) -> tuple[Header, bytes, Bytes] | None:
        """Return header, meta and data, None unless they are complete; needs the lock.

        The data are mapped anew, for the caller alone: pages that it writes to are copied.
        """
        try:
            with self._opened(os.O_RDONLY) as descriptor:
                header = _read_header(descriptor)
                if not header.version:
                    return None
                meta = os.pread(descriptor, header.meta_nbytes, _meta_at(header.nbytes))
                if xxhash.xxh3_64_intdigest(meta) != header.meta_checksum:
                    return None
                nbytes = PAGE + header.nbytes
                mapped = mmap.mmap(descriptor, nbytes, access=mmap.ACCESS_COPY)
        except FileNotFoundError:
            return None
        return header, meta, np.frombuffer(mapped, np.uint8)[PAGE:]

    def opened_for_writing(self, nbytes: int) -> tuple[Header, bytes, mmap.mmap]:
        """Return header, meta and memory, of a new file if it has another size; needs the lock."""
        read = self.read()
        header, meta = read[:2] if read else (self.header(), b"")
        if header.nbytes != nbytes:
            header, meta = Header(0, nbytes), b""
            self._create(header)
        with self._opened(os.O_RDWR) as descriptor:
            mapped = self._mapped(descriptor, nbytes)
        if not read:
            header = Header(0, nbytes)  # its meta may be damaged
        return header, meta, mapped

    def write_meta(self, nbytes: int, meta: bytes) -> None:
        """Write the meta behind `nbytes` bytes of data; needs the lock.

        Raises:
            WeightError: There is no room for it.
        """
        with self._opened(os.O_RDWR) as descriptor:
            self._allocate(descriptor, _meta_at(nbytes), len(meta))
            written = 0
            while written < len(meta):
                at = _meta_at(nbytes) + written
                written += os.pwrite(descriptor, memoryview(meta)[written:], at)

    def forget(self) -> None:
        """Make what is in it unusable; needs the lock."""
        with suppress(FileNotFoundError), self._opened(os.O_RDWR) as descriptor:
            header = _read_header(descriptor)
            if header.version:
                os.pwrite(descriptor, Header(0, header.nbytes).packed(), 0)

    def _create(self, header: Header) -> None:
        # a new file: shrinking the old one would kill whoever still has an array of it
        self.remove()
        try:
            with self._opened(os.O_RDWR | os.O_CREAT | os.O_EXCL) as descriptor:
                self._allocate(descriptor, 0, _meta_at(header.nbytes))
                os.pwrite(descriptor, header.packed(), 0)
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Take the file away; those who have it mapped keep it."""
        with suppress(FileNotFoundError):
            self.path.unlink()
        self._map = None

    def _allocate(self, descriptor: int, start: int, nbytes: int) -> None:
        if not nbytes:
            return
        try:
            # a file with holes would take its writer down by SIGBUS when the memory is used up
            os.posix_fallocate(descriptor, start, nbytes)
        except OSError as error:
            directory = self.path.parent.parent
            free = os.statvfs(directory)
            raise WeightError(
                f"no room for the host cache: a buffer of {nbytes:,} bytes does not fit into "
                f"{directory}, where {free.f_bavail * free.f_frsize:,} are free ({error.strerror})."
                " Two buffers are needed. Give the container more shared memory (--shm-size), or "
                "turn host_cache off."
            ) from error

    def _mapped(self, descriptor: int, nbytes: int) -> mmap.mmap:
        # kept: mapping pages anew costs as much as copying them. Never closed: arrays may use it
        mapped = self._kept(descriptor)
        if mapped is None or len(mapped) != PAGE + nbytes:
            mapped = mmap.mmap(descriptor, PAGE + nbytes)
            _populate(mapped)
            self._map = os.fstat(descriptor).st_ino, mapped
        return mapped

    def _kept(self, descriptor: int) -> mmap.mmap | None:
        """Return what is mapped of this file; one that another leader replaced is let go."""
        kept = self._map
        if kept is not None and kept[0] != os.fstat(descriptor).st_ino:
            kept = self._map = None
        return None if kept is None else kept[1]

    @contextmanager
    def _opened(self, flags: int) -> Iterator[int]:
        descriptor = os.open(self.path, flags | _FLAGS, 0o600)
        try:
            yield descriptor
        finally:
            os.close(descriptor)


def _populate(mapped: mmap.mmap) -> None:
    """Map all pages for writing at once: page by page it takes longer than filling them."""
    for start in range(0, len(mapped), _POPULATED):
        try:
            # in parts: other threads stand still meanwhile
            mapped.madvise(_MADV_POPULATE_WRITE, start, min(_POPULATED, len(mapped) - start))
        except OSError:  # of a kernel before 5.14
            return


def _read_header(descriptor: int) -> Header:
    found = os.pread(descriptor, HEADER_BYTES, 0)
    if len(found) < HEADER_BYTES:
        return _NOTHING
    fields, checksum = found[: _FIELDS.size], found[_FIELDS.size :]
    if checksum != _CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields)):
        return _NOTHING
    magic, *numbers = _FIELDS.unpack(fields)
    header = Header(*numbers)
    if magic != _MAGIC or header.version > MAX_VERSION or header.meta_nbytes > MAX_META:
        return _NOTHING
    if _meta_at(header.nbytes) + header.meta_nbytes > os.fstat(descriptor).st_size:
        return _NOTHING
    return header


def _meta_at(nbytes: int) -> int:
    return PAGE + -(-nbytes // PAGE) * PAGE
