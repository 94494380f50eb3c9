"""The directory of a host cache: processes join it, and the last one to leave deletes it."""

from __future__ import annotations

import os
import re
import shutil
import stat
import threading
import time
import uuid
from contextlib import suppress
from multiprocessing.util import Finalize
from pathlib import Path

from redrb.errors import ConfigError, WeightError
from redrb.weights.host import locks

LEADER = "leader"
BUFFERS = ("0", "1")
"""Names of the locks in every cache directory: the leader's, and those of the two buffers."""

_USERS = "users"
_DELETED = "gone-"
_CACHE_NAME = re.compile(r"[0-9a-f]{32}")
_IDLE_S = 3600.0  # an unused directory is deleted this long after its last use
_JOINS = 200
_JOIN_PAUSE_S = 0.005


class CacheDirectory:
    """The directory of one key, and the shared lock that marks it as in use.

    The last process to leave deletes the directory. A process leaves when this object is dropped,
    or when it exits normally.

    Attributes:
        path: The directory of the locks and buffers.
    """

    def __init__(self, path: Path, users: locks.FileLock) -> None:
        self.path = path
        self._users = users
        # not weakref.finalize: children of multiprocessing do not run atexit functions
        self._finalizer = Finalize(self, _leave, args=(path, users), exitpriority=0)

    @property
    def is_current(self) -> bool:
        """Whether this process (not its parent) joined, and the directory still exists."""
        return self._users.is_at(self.path / _USERS)

    def touch(self) -> None:
        """Renew the time that `sweep` looks at."""
        os.utime(self.path / _USERS)

    def leave(self) -> None:
        """Leave; the last user deletes the directory."""
        self._finalizer()


def _leave(path: Path, users: locks.FileLock) -> None:
    if not users.is_held:  # this is a fork, and the lock is its parent's
        return
    with suppress(OSError):  # `sweep` deletes the rest later
        if users.make_exclusive():
            _delete(path, users)
    users.release()


def join(directory: Path, name: str) -> CacheDirectory:
    """Join the cache directory `name` in `directory`; create it if it is missing.

    Raises:
        ConfigError: The directory belongs to another user, or others may write to it.
        WeightError: A process keeps the directory locked.
    """
    path = directory / name
    users = path / _USERS
    for _ in range(_JOINS):
        _check(directory)
        with suppress(FileNotFoundError):  # the last user has just deleted it: try again
            with suppress(FileExistsError):  # exist_ok would check again, after a deletion
                path.mkdir(mode=0o700)
            locks.create(users)
            lock = locks.acquire(users, exclusive=False)
            if lock is None:  # it is being deleted: the lock lasts for one rename
                threading.Event().wait(_JOIN_PAUSE_S)
            elif lock.is_at(users):
                for lock_name in (LEADER, *BUFFERS):
                    locks.create(path / lock_name)
                joined = CacheDirectory(path, lock)
                joined.touch()
                return joined
            else:
                lock.release()
    raise WeightError(
        f"{path} stays locked by a process that does not go on: find it with `fuser {users}`, or "
        "leave host_cache out."
    )


def sweep(directory: Path, keep: str) -> None:
    """Delete cache directories that killed processes left and nobody has used for an hour."""
    with suppress(OSError):  # other processes may sweep at the same time
        for path in list(directory.iterdir()):
            if path.name.startswith(_DELETED):
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != keep and _CACHE_NAME.fullmatch(path.name):
                _sweep_one(path)


def _sweep_one(path: Path) -> None:
    users = path / _USERS
    with suppress(OSError):
        if time.time() - (users if users.exists() else path).stat().st_mtime < _IDLE_S:
            return
        locks.create(users)
        lock = locks.acquire(users, exclusive=True)
        if lock is not None:
            _delete(path, lock)


def _delete(path: Path, users: locks.FileLock) -> None:
    """Delete the directory by one rename first, so that no process joins half of it.

    The caller holds `users` exclusively.
    """
    gone = path.with_name(_DELETED + uuid.uuid4().hex)
    try:
        if not users.is_at(path / _USERS):
            return
        path.rename(gone)
    finally:
        users.release()
    shutil.rmtree(gone, ignore_errors=True)


def _check(directory: Path) -> None:
    with suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise ConfigError(
            f"{directory} is not a directory that only user {os.geteuid()} may write to "
            f"({stat.filemode(found.st_mode)}, user {found.st_uid}). Delete it, or leave "
            "host_cache out."
        )
