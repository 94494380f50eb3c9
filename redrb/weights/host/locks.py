"""Locks between the processes of a host, with waits that need no polling.

A lock is a FIFO to which nobody writes. `flock` on it excludes other holders. Its holders have it
open for writing, so that others can wait, with a timeout, until the kernel reports that the last
holder has closed it, however that process ended.
"""

from __future__ import annotations

import fcntl
import math
import os
import select
import threading
import weakref
from contextlib import suppress
from pathlib import Path

_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
_LONGEST_S = 86400.0  # poll counts milliseconds in 32 bits


class _Process:
    """The lock files that this process has open, so that its forks close their copies at once.

    An open copy in a child would keep a lock after its parent was killed.
    """

    def __init__(self) -> None:
        self.guard = threading.RLock()  # a finalizer may run while its thread holds it
        self.held: set[int] = set()

    def forget(self) -> None:
        """In a fork: close the copies of the parent's lock files; the parent keeps its locks."""
        self.guard = threading.RLock()
        for descriptor in self.held:
            os.close(descriptor)
        self.held.clear()


_process = _Process()
os.register_at_fork(
    before=lambda: _process.guard.acquire(),
    after_in_parent=lambda: _process.guard.release(),
    after_in_child=_process.forget,
)


class FileLock:
    """A held lock, until `release` or until this object is garbage."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._pid = os.getpid()
        self._finalizer = weakref.finalize(self, _release, descriptor, self._pid)
        self._finalizer.atexit = False

    @property
    def is_held(self) -> bool:
        """Whether this process holds the lock; a fork does not hold its parent's locks."""
        return self._finalizer.alive and self._pid == os.getpid()

    def release(self) -> None:
        """Release the lock; more than once does no harm, and in a fork it does nothing."""
        self._finalizer()

    def hold_while_alive(self, memory: object) -> None:
        """Hold the lock until `memory` is garbage, in this process and in its forks."""
        with _process.guard:
            if self.is_held:
                self._finalizer.detach()
                _process.held.discard(self._descriptor)
                # closed, not unlocked: it stays locked while a fork has a copy
                weakref.finalize(memory, os.close, self._descriptor).atexit = False

    def is_at(self, path: Path) -> bool:
        """Whether the locked file is still the file at `path`."""
        with _process.guard:
            if not self.is_held:
                return False
            try:
                return os.path.samestat(path.stat(), os.fstat(self._descriptor))
            except FileNotFoundError:
                return False

    def make_exclusive(self) -> bool:
        """Make a shared lock exclusive; if other processes share it, it may be lost instead."""
        with _process.guard:
            return self.is_held and _locked(self._descriptor, fcntl.LOCK_EX)


def create(path: Path) -> None:
    """Create the file of a lock unless it exists."""
    with suppress(FileExistsError):
        os.mkfifo(path, 0o600)


def acquire(path: Path, *, exclusive: bool) -> FileLock | None:
    """Acquire the lock at `path` without waiting; None if another holder excludes it."""
    with _process.guard:
        descriptor = os.open(path, os.O_RDWR | _FLAGS)
        if _locked(descriptor, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH):
            _process.held.add(descriptor)
            return FileLock(descriptor)
        os.close(descriptor)
        return None


def acquire_in_new_file(path: Path) -> FileLock | None:
    """Acquire the lock at `path` exclusively, in a new file; None if another process holds it.

    Processes that wait on the old file learn that its holder is gone, even if they look only after
    the next holder has come.
    """
    old = acquire(path, exclusive=True)
    if old is None:
        return None
    try:
        if not old.is_at(path):  # another process was faster
            return None
        return acquire_replacing(path)
    finally:
        old.release()


def acquire_replacing(path: Path) -> FileLock:
    """Lock a new file in place of the file at `path`, even if that is held.

    Only one process at a time may call this.
    """
    fresh = path.with_name(f"{path.name}.next")
    fresh.unlink(missing_ok=True)  # left by a process that was killed here
    create(fresh)
    new = acquire(fresh, exclusive=True)
    if new is None:
        raise BlockingIOError(f"{fresh} is locked by another process")
    fresh.rename(path)
    return new


def wait_released(path: Path, timeout: float) -> bool:
    """Wait until nobody holds the lock at `path`, at most `timeout` seconds.

    Returns:
        Whether the lock was free, at least for a moment.
    """
    with _process.guard:
        watcher = _watcher(path)
    try:
        poll = select.poll()
        poll.register(watcher, 0)  # poll always reports a hang-up
        return bool(poll.poll(math.ceil(1000 * min(max(timeout, 0.0), _LONGEST_S))))
    finally:
        os.close(watcher)


def _watcher(path: Path) -> int:
    while True:
        # a FIFO that has had no writer since it was opened reports no hang-up
        writer = os.open(path, os.O_RDWR | _FLAGS)
        try:
            watcher = os.open(path, os.O_RDONLY | _FLAGS)
            if os.path.sameopenfile(writer, watcher):
                return watcher
            os.close(watcher)  # `acquire_replacing` came in between
        finally:
            os.close(writer)


def _locked(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _release(descriptor: int, pid: int) -> None:
    if pid != os.getpid():
        return  # the fork has closed its copy; the number may be another file's now
    with _process.guard:
        _process.held.discard(descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # even if a fork of other code has a copy
        finally:
            os.close(descriptor)
