"""Published weights in memory that all makers of a host share.

Of those who want a version one leads: it fetches, and the others wait for it, then map what it
wrote. There are two buffers, so that the older one can be brought up to date while readers still
copy from the newer one. What lies in them, and how it came there, is not known here.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import xxhash

from redrb.checks import checked_int
from redrb.errors import ConfigError, WeightError
from redrb.weights.host import locks
from redrb.weights.host.buffer import HEADER_BYTES, MAX_META, PAGE, Buffer, Bytes, Header
from redrb.weights.host.cache_directory import BUFFERS, LEADER, CacheDirectory, join, sweep
from redrb.weights.wire.manifest import MAX_VERSION

_PATIENCE_S = 1.0  # for a buffer that is complete, and locked for a moment
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  the directory in it is checked before it is used


class HostCache:
    """The host's copy of the weights `key`; threads and processes may share it.

    A fork of the process joins by itself, and has nothing of what its parent holds.

    Args:
        key: Any text that is the same for all readers of the same weights.
        directory: Where the files are; default: a directory of this user in shared memory. It is
            made at the first use.

    Raises:
        ConfigError: At the first use: the directory is not this user's alone; or it was closed.
        WeightError: Files or locks in the directory could not be made or read.
    """

    def __init__(self, key: str, *, directory: Path | None = None) -> None:
        self._directory = directory or _SHARED_MEMORY / f"redrb-{os.geteuid()}"
        self._name = hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
        self._joined: _Joined | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"<redrb.HostCache {self._directory / self._name}>"

    @property
    def has_led(self) -> bool:
        """Whether this process has written a buffer, so that the next one costs less."""
        return self._joined is not None and any(b.is_mapped for b in self._joined.buffers)

    def newest(self) -> HeldBuffer | None:
        """Return the complete buffer with the largest version, which nobody changes while held."""
        with _cache_errors(self._directory):
            return _newest(self._join().buffers)

    def lead(self) -> CacheLeader | None:
        """Become the one that writes, at once; None when another process or thread is."""
        with _cache_errors(self._directory):
            joined = self._join()
            grip = locks.take_over(joined.leader)
            if grip is None:
                return None
            joined.home.touch()
            return CacheLeader(joined, self._directory, grip)

    def wait(self, timeout: float) -> bool:
        """Wait, without polling, until whoever leads has finished or died.

        Args:
            timeout: Seconds.

        Returns:
            Whether that is so (another one may lead by now); False: it still leads.
        """
        with _cache_errors(self._directory):
            return locks.wait_released(self._join().leader, timeout)

    def close(self) -> None:
        """Leave; the last one of the host to do so takes the files away. Closing twice is no harm.

        What is held stays readable.
        """
        self._closed = True
        joined, self._joined = self._joined, None
        if joined is not None:
            joined.home.leave()

    def _join(self) -> _Joined:
        if self._closed:
            raise ConfigError("the host cache is closed: make another one.")
        joined = self._joined
        if joined is None or not joined.home.is_current:
            joined = _Joined(join(self._directory, self._name))
            self._joined = joined  # the last one's of two threads; a Home that is dropped leaves
            sweep(self._directory, self._name)
        return joined


class HeldBuffer:
    """A complete buffer, under a shared lock until `close` or the end of its `with`.

    Attributes:
        version: Of the weights in it.
        meta: What the writer gave along.
        data: The bytes; pages that are written to become this process' own. They may change once
            this is closed, unless they were lent.
    """

    def __init__(self, grip: locks.FileLock, header: Header, meta: bytes, data: Bytes) -> None:
        self._grip = grip
        self._lent = False
        self.version = header.version
        self.meta = meta
        self.data = data

    def lend(self) -> Bytes:
        """Return the bytes for longer: they stay as they are until nobody has an array of them.

        Forks of this process, which have them too, count as well.

        Raises:
            WeightError: This is closed, or it is its parent process that holds it.
        """
        if not self._lent:
            if not self._grip.is_held:
                raise WeightError("this buffer is not held any more: newest() again.")
            self._lent = True
            self._grip.stay_with(self.mapped)
        return self.data

    @property
    def mapped(self) -> mmap.mmap:
        """The mapping that the bytes are in."""
        memory = self.data
        while isinstance(memory.base, np.ndarray):
            memory = memory.base
        found: Any = memory.base.obj if isinstance(memory.base, memoryview) else memory.base
        return cast(mmap.mmap, found)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Let a leader write into it, unless its bytes were lent."""
        self._grip.release()


class CacheLeader:
    """The right to write, until `close` or the end of its `with`; then all who wait wake up."""

    def __init__(self, joined: _Joined, directory: Path, grip: locks.FileLock) -> None:
        self._joined = joined
        self._directory = directory
        self._grip = grip
        self._fillings: list[BufferWriter] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def buffer(self, nbytes: int, *, timeout: float = 0.1) -> BufferWriter:
        """Return the buffer that is not the newest, locked for writing.

        It keeps what it has if it has this size and nobody reads it, and is made anew otherwise:
        who reads the old one keeps it, and it takes memory until then.

        Args:
            nbytes: Its size.
            timeout: Seconds to wait for those who still read it.

        Raises:
            WeightError: It does not fit into shared memory, or this leads no more.
        """
        nbytes = checked_int("nbytes", nbytes)
        self._check()
        deadline = time.monotonic() + timeout
        with _cache_errors(self._directory):
            while True:
                buffer = self._oldest()
                grip = _exclusive(buffer, deadline)
                try:
                    if buffer is self._oldest():
                        filling = BufferWriter(buffer, self._directory, grip, nbytes)
                        self._fillings.append(filling)
                        return filling
                except BaseException:
                    grip.release()
                    raise
                grip.release()  # where containers share files, another one may have been faster

    def forget(self, version: int, *, timeout: float = 0.1) -> None:
        """Make `version` unusable: say, because the server lost it, and counts from 1 again.

        Args:
            version: Of one of the buffers; one that neither has is forgotten already.
            timeout: Seconds to wait for those who still read it; after them they keep what they
                have, and it is made anew for others.

        Raises:
            WeightError: This leads no more.
        """
        self._check()
        deadline = time.monotonic() + timeout
        with _cache_errors(self._directory):
            for buffer in self._joined.buffers:
                if buffer.header().version != version:
                    continue
                grip = _exclusive(buffer, deadline)
                try:
                    if buffer.header().version == version:
                        buffer.forget()
                finally:
                    grip.release()

    def close(self) -> None:
        """End the leadership, and drop what was not committed."""
        for filling in self._fillings:
            filling.close()
        self._fillings.clear()
        self._grip.release()

    def _check(self) -> None:
        if not self._grip.is_held:
            raise WeightError("this leads no more (or its parent process does): call lead() again.")

    def _oldest(self) -> Buffer:
        return min(self._joined.buffers, key=lambda buffer: buffer.header().version)


class BufferWriter:
    """A buffer that the leader writes, until `commit`, `close`, or the end of the leadership.

    Attributes:
        version: Of the weights in it; 0: nothing in it is usable.
        meta: What was committed with them.
    """

    def __init__(self, buffer: Buffer, directory: Path, grip: locks.FileLock, nbytes: int) -> None:
        header, self.meta, memory = buffer.opened_for_writing(nbytes)
        self.version = header.version
        self._buffer = buffer
        self._directory = directory
        self._grip = grip
        self._nbytes = nbytes
        self._memory: mmap.mmap | None = memory
        self._begun = False

    @property
    def data(self) -> Bytes:
        """The bytes, read-only before `begin`; write to none of it after `commit`."""
        data = np.frombuffer(self._writable(), np.uint8)[PAGE:]
        data.flags.writeable = self._begun
        return data

    def begin(self) -> None:
        """Mark the buffer as unusable, before its first byte changes."""
        self._write(Header(0, self._nbytes))
        self.version, self.meta, self._begun = 0, b"", True

    def commit(self, version: int, meta: bytes) -> None:
        """Mark the buffer as complete, and unlock it: from now on `newest` finds it.

        Args:
            version: Of the weights in it, 1 or more.
            meta: What readers need to know to use the bytes.

        Raises:
            WeightError: There is no room for `meta`, or the buffer is no more the leader's.
        """
        version = checked_int("version", version, 1, MAX_VERSION)
        if len(meta) > MAX_META:
            raise ConfigError(f"{len(meta):,} bytes of meta: {MAX_META:,} are the most.")
        if not self._begun:
            raise ConfigError("begin() comes before the bytes change, and before commit().")
        self._writable()
        with _cache_errors(self._directory):
            self._buffer.write_meta(self._nbytes, meta)
        self._write(Header(version, self._nbytes, len(meta), xxhash.xxh3_64_intdigest(meta)))
        self.version, self.meta = version, meta
        self.close()

    def close(self) -> None:
        """Unlock the buffer; after `begin` and without `commit` it stays unusable."""
        self._memory = None
        self._grip.release()

    def _write(self, header: Header) -> None:
        self._writable()[:HEADER_BYTES] = header.packed()

    def _writable(self) -> mmap.mmap:
        if self._memory is None or not self._grip.is_held:
            raise WeightError("this buffer is not held for writing any more: lead() again.")
        return self._memory


class _Joined:
    """What a `HostCache` has from its first use on."""

    def __init__(self, home: CacheDirectory) -> None:
        self.home = home
        self.leader = home.path / LEADER
        self.buffers = tuple(
            Buffer(home.path / f"{lock}.data", home.path / lock) for lock in BUFFERS
        )


def _newest(buffers: Sequence[Buffer]) -> HeldBuffer | None:
    deadline = time.monotonic() + _PATIENCE_S
    usable = list(buffers)
    seen = None
    while usable:
        version, buffer = max(
            ((buffer.header().version, buffer) for buffer in usable), key=lambda pair: pair[0]
        )
        if not version:
            return None
        grip = locks.take(buffer.lock, exclusive=False)
        if grip is not None:
            held, is_damaged = _hold(buffer, grip)
            if held is not None:
                return held
            if is_damaged:
                usable.remove(buffer)
        elif seen == (version, buffer):
            # its writer has not unlocked it yet, or is dying: an older version would pass for the
            # newest. Had the other one become the newest, this second look would have shown it
            left = deadline - time.monotonic()
            if left <= 0 or not locks.wait_released(buffer.lock, left):
                usable.remove(buffer)
        seen = (version, buffer)
    return None


def _hold(buffer: Buffer, grip: locks.FileLock) -> tuple[HeldBuffer | None, bool]:
    """Return the buffer's content, if it is complete, and whether only its header seems so."""
    try:
        read = buffer.read()
        if not grip.is_at(buffer.lock):  # a leader did not wait for this: the file may be another
            grip.release()
            return None, False
        if read is not None:
            return HeldBuffer(grip, *read), False
        is_damaged = buffer.header().version > 0
    except BaseException:
        grip.release()
        raise
    grip.release()
    return None, is_damaged


def _exclusive(buffer: Buffer, deadline: float) -> locks.FileLock:
    """Lock a buffer for writing; when somebody reads it all the time, another one in its place.

    Only who leads does so.
    """
    while True:
        grip = locks.take(buffer.lock, exclusive=True)
        if grip is not None:
            return grip
        left = deadline - time.monotonic()
        if left <= 0 or not locks.wait_released(buffer.lock, left):
            # in this order: killed in between, it leaves no file that is read and locked by nobody
            buffer.remove()
            return locks.replace(buffer.lock)


@contextmanager
def _cache_errors(directory: Path) -> Iterator[None]:
    """Turn what the system says about files in `directory` into an error of redrb."""
    try:
        yield
    except OSError as error:
        raise WeightError(
            f"the host cache in {directory} is not usable: {error}. Check that the directory is "
            "there, that it has room, and that files may be opened; or turn host_cache off."
        ) from error
