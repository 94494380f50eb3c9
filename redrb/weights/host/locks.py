"""Locks between the processes of a host, with waits that need no polling.

`flock` on a file excludes other holders, and ends with its process. A lock that others wait for is
a FIFO to which nobody writes: its holder has it open for writing, so that the kernel reports, to
those who wait with a timeout, that the holder has closed it, however its process ended.
"""

from __future__ import annotations

import fcntl
import math
import os
import select
import weakref
from contextlib import suppress
from pathlib import Path

from redrb import forks
from redrb.forks import guard, in_child

_FLAGS = os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
_LONGEST_S = 86400.0  # poll counts milliseconds in 32 bits


class _Process:
    """The locked files that this process has open, so that its forks close their copies at once.

    An open copy in a child would keep a lock after its parent was killed. Only copies of locks that
    are held for memory stay open: the child has that memory as well.
    """

    def __init__(self) -> None:
        self.held: set[int] = set()
        self.held_for_memory: set[int] = set()

    def forget(self) -> None:
        """In a fork: close the copies of the parent's locked files; the parent keeps its locks."""
        for descriptor in self.held:
            os.close(descriptor)
        self.held.clear()

    def close(self, descriptor: int) -> None:
        """Close a locked file, unless that was done."""
        with guard:
            for descriptors in (self.held, self.held_for_memory):
                if descriptor in descriptors:
                    descriptors.remove(descriptor)
                    os.close(descriptor)


_process = _Process()
in_child(_process.forget)


class FileLock:
    """A held lock, until `release` or until this object is garbage."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._finalizer = weakref.finalize(self, _close, descriptor, forks.process)
        self._finalizer.atexit = False

    def release(self) -> None:
        """Release the lock; more than once does no harm, and in a fork it does nothing."""
        self._finalizer()

    def hold_while_alive(self, memory: object) -> None:
        """Hold the lock until `memory` is garbage, in this process and in its forks."""
        with guard:
            if self._finalizer.detach() is not None:
                _process.held.remove(self._descriptor)
                _process.held_for_memory.add(self._descriptor)
                # closed, not unlocked: it stays locked while a fork has a copy
                weakref.finalize(memory, _process.close, self._descriptor).atexit = False


def acquire(path: Path, *, exclusive: bool) -> FileLock | None:
    """Lock a file without waiting; None if there is none, or another holder excludes this one."""
    with guard:
        try:
            descriptor = os.open(path, _FLAGS)
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
            # the holder before may have removed or renamed the file
            is_there = os.path.samestat(path.stat(), os.fstat(descriptor))
        except (BlockingIOError, FileNotFoundError):
            is_there = False
        except BaseException:
            os.close(descriptor)
            raise
        if is_there:
            _process.held.add(descriptor)
            return FileLock(descriptor)
        os.close(descriptor)
        return None


def acquire_fifo(path: Path) -> FileLock | None:
    """Lock the FIFO at `path` alone, without waiting, and make it if there is none."""
    with suppress(FileExistsError):
        os.mkfifo(path, 0o600)
    return acquire(path, exclusive=True)


def wait_released(path: Path, timeout: float) -> bool:
    """Return whether the holder of the FIFO at `path` removes or releases it in time."""
    try:
        with guard:
            watcher = _watcher(path)
    except FileNotFoundError:
        return True
    try:
        poll = select.poll()
        poll.register(watcher, 0)  # poll always reports a hang-up
        return bool(poll.poll(math.ceil(1000 * min(max(timeout, 0.0), _LONGEST_S))))
    finally:
        os.close(watcher)


def release_memory() -> None:
    """Release the locks that are held for memory of this process, which is about to end."""
    for descriptor in [*_process.held_for_memory]:
        _process.close(descriptor)


def _watcher(path: Path) -> int:
    while True:
        # a FIFO that has had no writer since it was opened reports no hang-up
        writer = os.open(path, _FLAGS)
        try:
            watcher = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
            if os.path.sameopenfile(writer, watcher):
                return watcher
            os.close(watcher)  # another holder has made a new one in between
        finally:
            os.close(writer)


def _close(descriptor: int, owner: object) -> None:
    # else the fork has closed its copy; another file may have its number
    if owner is forks.process:
        _process.close(descriptor)
