"""A buffer of a host cache: a file in shared memory whose header says whether it is complete."""

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
"""Bytes of the header."""

MAX_META = 256 << 20
"""Limit of the meta bytes of a buffer."""

PAGE = 4096
"""Offset of the data."""

_MAGIC = b"redrbHC1"
_MADV_POPULATE_WRITE = 23  # since Linux 5.14; Python's mmap has no name for it
_POPULATED = 4 << 20
_FIELDS = struct.Struct("<8s4Q")  # magic, version, nbytes, meta's size and xxh3
_CHECKSUM = struct.Struct("<Q")  # xxh3 of the fields
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW


@dataclass(frozen=True, slots=True)
class Header:
    """The first bytes of a buffer; version 0 if its content is not usable."""

    version: int
    nbytes: int
    meta_nbytes: int = 0
    meta_checksum: int = 0

    def packed(self) -> bytes:
        """Return the header as bytes."""
        fields = _FIELDS.pack(
            _MAGIC, self.version, self.nbytes, self.meta_nbytes, self.meta_checksum
        )
        return fields + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields))


_NOTHING = Header(0, -1)


class Buffer:
    """A file: a page with the header, then the data, then, on a new page, the meta bytes.

    Only the holder of the exclusive lock writes. The header may be read without the lock, since a
    half-written header does not match its checksum.
    """

    def __init__(self, path: Path, lock_path: Path) -> None:
        self.path = path
        self.lock_path = lock_path
        self._map: tuple[int, mmap.mmap] | None = None

    @property
    def is_mapped(self) -> bool:
        """Whether this process has the file mapped for writing."""
        return self._map is not None

    def header(self) -> Header:
        """Read the header; its version is 0 if the file is missing or damaged."""
        try:
            with self._opened(os.O_RDONLY) as descriptor:
                self._kept(descriptor)
                return _read_header(descriptor)
        except FileNotFoundError:
            self._map = None
            return _NOTHING

    def read(self) -> tuple[Header, bytes, Bytes] | None:
        """Return header, meta and data, or None if they are not complete; needs the lock.

        The data are a new private map: pages that the caller writes to are copied.
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
        """Return header, meta and memory, in a new file if the size differs; needs the lock."""
        read = self.read()
        header, meta = read[:2] if read else (self.header(), b"")
        if header.nbytes != nbytes:
            header, meta = Header(0, nbytes), b""
            self._create(header)
        with self._opened(os.O_RDWR) as descriptor:
            mapped = self._mapped(descriptor, nbytes)
        if not read:
            header = Header(0, nbytes)  # the meta bytes may be damaged
        return header, meta, mapped

    def write_meta(self, nbytes: int, meta: bytes) -> None:
        """Write the meta bytes after `nbytes` bytes of data; needs the lock.

        Raises:
            WeightError: There is no room for them.
        """
        with self._opened(os.O_RDWR) as descriptor:
            self._allocate(descriptor, _meta_at(nbytes), len(meta))
            written = 0
            while written < len(meta):
                at = _meta_at(nbytes) + written
                written += os.pwrite(descriptor, memoryview(meta)[written:], at)

    def forget(self) -> None:
        """Mark the content as unusable; needs the lock."""
        with suppress(FileNotFoundError), self._opened(os.O_RDWR) as descriptor:
            header = _read_header(descriptor)
            if header.version:
                os.pwrite(descriptor, Header(0, header.nbytes).packed(), 0)

    def _create(self, header: Header) -> None:
        # a new file: shrinking the old one would kill (SIGBUS) processes that still map it
        self.remove()
        try:
            with self._opened(os.O_RDWR | os.O_CREAT | os.O_EXCL) as descriptor:
                self._allocate(descriptor, 0, _meta_at(header.nbytes))
                os.pwrite(descriptor, header.packed(), 0)
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Delete the file; processes that have it mapped keep their memory."""
        with suppress(FileNotFoundError):
            self.path.unlink()
        self._map = None

    def _allocate(self, descriptor: int, start: int, nbytes: int) -> None:
        if not nbytes:
            return
        try:
            # without this, a writer dies of SIGBUS when shared memory is full
            os.posix_fallocate(descriptor, start, nbytes)
        except OSError as error:
            directory = self.path.parent.parent
            free = os.statvfs(directory)
            raise WeightError(
                f"no room for the host cache: a buffer of {nbytes:,} bytes does not fit into "
                f"{directory}, where {free.f_bavail * free.f_frsize:,} bytes are free "
                f"({error.strerror}). The cache needs two buffers: give the container more shared "
                "memory (--shm-size), or leave host_cache out."
            ) from error

    def _mapped(self, descriptor: int, nbytes: int) -> mmap.mmap:
        # kept, since mapping pages again costs as much as copying them; never closed, since arrays
        # may use it
        mapped = self._kept(descriptor)
        if mapped is None or len(mapped) != PAGE + nbytes:
            mapped = mmap.mmap(descriptor, PAGE + nbytes)
            _populate(mapped)
            self._map = os.fstat(descriptor).st_ino, mapped
        return mapped

    def _kept(self, descriptor: int) -> mmap.mmap | None:
        """Return this process' map of the file; drop it if another leader has replaced the file."""
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
    """Map all pages for writing: one by one at first access takes longer than filling them."""
    for start in range(0, len(mapped), _POPULATED):
        try:
            # in parts: the call blocks the other threads of this process
            mapped.madvise(_MADV_POPULATE_WRITE, start, min(_POPULATED, len(mapped) - start))
        except OSError:  # kernels before 5.14
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


@contextmanager
def cache_errors(directory: Path) -> Iterator[None]:
    """Raise operating system errors about files in `directory` as `WeightError`."""
    try:
        yield
    except OSError as error:
        raise WeightError(
            f"the host cache in {directory} is not usable: {error}. Check that the directory "
            "exists and has room, and that this process may open files; or leave host_cache out."
        ) from error
