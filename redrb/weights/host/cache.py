"""One copy of published weights in shared memory, for all readers on a host.

One process leads: it fetches a version into a buffer, and the other processes wait, then map that
buffer. There are two buffers, so that the leader can write the older one while readers still use
the newer one. This package does not know what the bytes mean.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from redrb.errors import ConfigError
from redrb.weights.host import locks
from redrb.weights.host.buffer import Buffer, cache_errors
from redrb.weights.host.buffer_reading import HeldBuffer, newest_buffer
from redrb.weights.host.buffer_writing import CacheLeader
from redrb.weights.host.cache_directory import BUFFERS, LEADER, CacheDirectory, join, sweep

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  the directory in it is checked before it is used


class HostCache:
    """The host's copy of the weights `key`, which threads and processes share.

    A forked process joins the cache again by itself; it holds none of its parent's locks.

    Args:
        key: A text that is equal for all readers of the same weights.
        directory: Directory of the files, created at the first use; default: a directory of this
            user in shared memory.

    Raises:
        ConfigError: At the first use: other users may write to the directory, or the cache was
            closed.
        WeightError: Files or locks in the directory could not be created or read.
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
        """Whether this process has written a buffer before, which makes the next one cheaper."""
        return self._joined is not None and any(b.is_mapped for b in self._joined.buffers)

    def newest(self) -> HeldBuffer | None:
        """Return the complete buffer with the largest version; nobody writes to it while held."""
        with cache_errors(self._directory):
            return newest_buffer(self._join().buffers)

    def lead(self) -> CacheLeader | None:
        """Become the leader without waiting; None if another process or thread leads."""
        with cache_errors(self._directory):
            joined = self._join()
            lock = locks.acquire_in_new_file(joined.leader)
            if lock is None:
                return None
            joined.directory.touch()
            return CacheLeader(joined.buffers, self._directory, lock)

    def wait(self, timeout: float) -> bool:
        """Wait, without polling, until the leader has finished or died.

        Args:
            timeout: Seconds.

        Returns:
            Whether it has; another process may lead by then.
        """
        with cache_errors(self._directory):
            return locks.wait_released(self._join().leader, timeout)

    def close(self) -> None:
        """Leave the cache; the last process of the host to leave deletes the files.

        Held buffers stay readable. Closing twice does no harm.
        """
        self._closed = True
        joined, self._joined = self._joined, None
        if joined is not None:
            joined.directory.leave()

    def _join(self) -> _Joined:
        if self._closed:
            raise ConfigError("this host cache is closed: create a new HostCache.")
        joined = self._joined
        if joined is None or not joined.directory.is_current:
            joined = _Joined(join(self._directory, self._name))
            # if two threads join at once, the directory object that is dropped leaves by itself
            self._joined = joined
            sweep(self._directory, self._name)
        return joined


class _Joined:
    """A cache directory with the leader's lock and the two buffers in it."""

    def __init__(self, directory: CacheDirectory) -> None:
        self.directory = directory
        self.leader = directory.path / LEADER
        self.buffers = tuple(
            Buffer(directory.path / f"{lock}.data", directory.path / lock) for lock in BUFFERS
        )
