"""Locks between the processes of a host that tell when they are free.

A lock is a FIFO that is never written to. `flock` on it excludes; that its holders have it open for
writing lets others wait for them without polling, and with a timeout: the kernel tells when the
last one has closed it, however that process ended.
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
    """The lock files that this process has open, so that a fork of it drops its copies at once.

    A copy in a child would keep what the parent has locked when the parent is killed.
    """

    def __init__(self) -> None:
        self.guard = threading.RLock()  # of a finalizer, too, that runs while its thread holds it
        self.held: set[int] = set()

    def forget(self) -> None:
        """In a fork: close what is the parent's, which its locks outlive."""
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
    """A lock that is held, until `release` or until nobody has this object any more."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._pid = os.getpid()
        self._finalizer = weakref.finalize(self, _release, descriptor, self._pid)
        self._finalizer.atexit = False

    @property
    def is_held(self) -> bool:
        """Whether this process has it: a fork does not have what its parent locked."""
        return self._finalizer.alive and self._pid == os.getpid()

    def release(self) -> None:
        """Let go; more than once does no harm, and in a fork it does nothing."""
        self._finalizer()

    def stay_with(self, memory: object) -> None:
        """From now on be held until `memory` is garbage; forks have it too, and hold it as well."""
        with _process.guard:
            if self.is_held:
                self._finalizer.detach()
                _process.held.discard(self._descriptor)
                # closed, not unlocked: it stays locked while a fork has its copy
                weakref.finalize(memory, os.close, self._descriptor).atexit = False

    def is_at(self, path: Path) -> bool:
        """Whether the file that is locked is still the one at `path`."""
        with _process.guard:
            if not self.is_held:
                return False
            try:
                return os.path.samestat(path.stat(), os.fstat(self._descriptor))
            except FileNotFoundError:
                return False

    def make_exclusive(self) -> bool:
        """Turn a shared lock into an exclusive one; where others share it, it may be lost."""
        with _process.guard:
            return self.is_held and _locked(self._descriptor, fcntl.LOCK_EX)


def make(path: Path) -> None:
    """Make the file of a lock, unless it is there."""
    with suppress(FileExistsError):
        os.mkfifo(path, 0o600)


def take(path: Path, *, exclusive: bool) -> FileLock | None:
    """Take the lock at `path` now, or return None when another one has it."""
    with _process.guard:
        descriptor = os.open(path, os.O_RDWR | _FLAGS)
        if _locked(descriptor, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH):
            _process.held.add(descriptor)
            return FileLock(descriptor)
        os.close(descriptor)
        return None


def take_over(path: Path) -> FileLock | None:
    """Take the lock at `path` exclusively, in a new file; None when another one has it.

    Who waits on the old file is told that its holder is gone, even if it looks only after the next
    one has come.
    """
    old = take(path, exclusive=True)
    if old is None:
        return None
    try:
        if not old.is_at(path):  # another one was faster
            return None
        return replace(path)
    finally:
        old.release()


def replace(path: Path) -> FileLock:
    """Lock a new file in place of the one at `path`, whoever holds that; one does so at a time."""
    own = path.with_name(f"{path.name}.next")
    own.unlink(missing_ok=True)  # of one that was killed here
    make(own)
    new = take(own, exclusive=True)
    if new is None:
        raise BlockingIOError(f"{own} is locked by another process")
    own.rename(path)
    return new


def wait_released(path: Path, timeout: float) -> bool:
    """Wait until nobody holds the lock at `path`, at most `timeout` seconds.

    Returns:
        Whether nobody did, at least for a moment.
    """
    with _process.guard:
        watcher = _watcher(path)
    try:
        poll = select.poll()
        poll.register(watcher, 0)  # a hang-up is always told
        return bool(poll.poll(math.ceil(1000 * min(max(timeout, 0.0), _LONGEST_S))))
    finally:
        os.close(watcher)


def _watcher(path: Path) -> int:
    while True:
        # without a writer at its opening the watcher would not be told that there is none
        writer = os.open(path, os.O_RDWR | _FLAGS)
        try:
            watcher = os.open(path, os.O_RDONLY | _FLAGS)
            if os.path.sameopenfile(writer, watcher):
                return watcher
            os.close(watcher)  # `replace` came in between
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
        return  # the fork closed its copy; the number may be another file's by now
    with _process.guard:
        _process.held.discard(descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # also where a foreign fork has a copy
        finally:
            os.close(descriptor)
