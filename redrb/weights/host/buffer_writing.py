"""Writing a host cache: one process leads at a time, and writes one buffer."""

from __future__ import annotations

import mmap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import numpy as np
import xxhash

from redrb.checks import checked_int
from redrb.errors import ConfigError, WeightError
from redrb.weights.host import locks
from redrb.weights.host.buffer import (
    HEADER_BYTES,
    MAX_META,
    PAGE,
    Buffer,
    Bytes,
    Header,
    cache_errors,
)
from redrb.weights.wire.manifest import MAX_VERSION


class CacheLeader:
    """The right to write, until `close` or the end of its `with`, which wakes waiting readers."""

    def __init__(self, buffers: Sequence[Buffer], directory: Path, lock: locks.FileLock) -> None:
        self._buffers = buffers
        self._directory = directory
        self._lock = lock
        self._writers: list[BufferWriter] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def buffer(self, nbytes: int, *, timeout: float = 0.1) -> BufferWriter:
        """Return the older buffer, locked for writing.

        It keeps its content if it has this size and nobody reads it. Otherwise a new file takes its
        place; readers keep the old file, which uses memory until the last of them drops it.

        Args:
            nbytes: Size of the buffer.
            timeout: Seconds to wait until nobody reads it.

        Raises:
            WeightError: The buffer does not fit into shared memory, or another process leads.
        """
        nbytes = checked_int("nbytes", nbytes)
        self._check()
        deadline = time.monotonic() + timeout
        with cache_errors(self._directory):
            while True:
                buffer = self._oldest()
                lock = _exclusive(buffer, deadline)
                try:
                    if buffer is self._oldest():
                        writer = BufferWriter(buffer, self._directory, lock, nbytes)
                        self._writers.append(writer)
                        return writer
                except BaseException:
                    lock.release()
                    raise
                lock.release()  # a container that shares these files may have been faster

    def forget(self, version: int, *, timeout: float = 0.1) -> None:
        """Mark a version as unusable, such as after the server lost its data and counts anew.

        Args:
            version: Version in one of the buffers; if neither holds it, nothing happens.
            timeout: Seconds to wait until nobody reads it; after that, readers keep the old file
                and a new one takes its place.

        Raises:
            WeightError: Another process leads.
        """
        self._check()
        deadline = time.monotonic() + timeout
        with cache_errors(self._directory):
            for buffer in self._buffers:
                if buffer.header().version != version:
                    continue
                lock = _exclusive(buffer, deadline)
                try:
                    if buffer.header().version == version:
                        buffer.forget()
                finally:
                    lock.release()

    def close(self) -> None:
        """End the leadership, and drop buffers that were not committed."""
        for writer in self._writers:
            writer.close()
        self._writers.clear()
        self._lock.release()

    def _check(self) -> None:
        if not self._lock.is_held:
            raise WeightError(
                "this process does not lead any more, or its parent leads: call lead() again."
            )

    def _oldest(self) -> Buffer:
        return min(self._buffers, key=lambda buffer: buffer.header().version)


class BufferWriter:
    """A buffer that the leader writes, until `commit`, `close`, or the end of the leadership.

    Attributes:
        version: Version of the weights in it; 0 if its content is not usable.
        meta: The bytes that were committed with the weights.
    """

    def __init__(self, buffer: Buffer, directory: Path, lock: locks.FileLock, nbytes: int) -> None:
        header, self.meta, memory = buffer.opened_for_writing(nbytes)
        self.version = header.version
        self._buffer = buffer
        self._directory = directory
        self._lock = lock
        self._nbytes = nbytes
        self._memory: mmap.mmap | None = memory
        self._begun = False

    @property
    def data(self) -> Bytes:
        """The bytes: read-only before `begin`, and not to be written after `commit`."""
        data = np.frombuffer(self._writable(), np.uint8)[PAGE:]
        data.flags.writeable = self._begun
        return data

    def begin(self) -> None:
        """Mark the content as unusable; call this before the first byte changes."""
        self._write(Header(0, self._nbytes))
        self.version, self.meta, self._begun = 0, b"", True

    def commit(self, version: int, meta: bytes) -> None:
        """Mark the buffer as complete and unlock it, so that `newest` returns it.

        Args:
            version: Version of the weights in it, >= 1.
            meta: Bytes that readers need to interpret the weights.

        Raises:
            WeightError: There is no room for `meta`, or another process leads.
        """
        version = checked_int("version", version, 1, MAX_VERSION)
        if len(meta) > MAX_META:
            raise ConfigError(f"{len(meta):,} bytes of meta: the limit is {MAX_META:,}.")
        if not self._begun:
            raise ConfigError("call begin() before the bytes change and before commit().")
        self._writable()
        with cache_errors(self._directory):
            self._buffer.write_meta(self._nbytes, meta)
        self._write(Header(version, self._nbytes, len(meta), xxhash.xxh3_64_intdigest(meta)))
        self.version, self.meta = version, meta
        self.close()

    def close(self) -> None:
        """Unlock the buffer; without `commit` its content stays unusable after `begin`."""
        self._memory = None
        self._lock.release()

    def _write(self, header: Header) -> None:
        self._writable()[:HEADER_BYTES] = header.packed()

    def _writable(self) -> mmap.mmap:
        if self._memory is None or not self._lock.is_held:
            raise WeightError("this buffer is not held for writing any more: call lead() again.")
        return self._memory


def _exclusive(buffer: Buffer, deadline: float) -> locks.FileLock:
    """Lock a buffer for writing; after `deadline`, a new file in its place.

    Only the leader calls this.
    """
    while True:
        lock = locks.acquire(buffer.lock_path, exclusive=True)
        if lock is not None:
            return lock
        left = deadline - time.monotonic()
        if left <= 0 or not locks.wait_released(buffer.lock_path, left):
            # in this order: a kill in between leaves no readable file without a lock
            buffer.remove()
            return locks.acquire_replacing(buffer.lock_path)
