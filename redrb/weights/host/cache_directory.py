"""The directory that all who use a host cache share, and that the last of them takes away."""

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
"""The locks that every home has: of who writes, and of the two buffers."""

_USERS = "users"
_GONE = "gone-"
_OURS = re.compile(r"[0-9a-f]{32}")
_IDLE_S = 3600.0  # what nobody has open is swept this long after its last use
_JOINS = 200
_JOIN_PAUSE_S = 0.005


class CacheDirectory:
    """The directory of one key, and the lock that says that it is in use.

    It is there as long as one process has joined: the last one to leave takes all of it away.
    Leaving happens by itself when this object is dropped, or the process ends in order.

    Attributes:
        path: Where locks and buffers are.
    """

    def __init__(self, path: Path, users: locks.FileLock) -> None:
        self.path = path
        self._users = users
        # not weakref's: processes of multiprocessing end without what atexit would run
        self._finalizer = Finalize(self, _leave, args=(path, users), exitpriority=0)

    @property
    def is_current(self) -> bool:
        """Whether it is this process that joined, and nobody removed the directory since."""
        return self._users.is_at(self.path / _USERS)

    def touch(self) -> None:
        """Tell those who sweep that it is in use."""
        os.utime(self.path / _USERS)

    def leave(self) -> None:
        """Leave; who is the last takes the files away."""
        self._finalizer()


def _leave(path: Path, users: locks.FileLock) -> None:
    if not users.is_held:  # in a fork it is its parent's
        return
    with suppress(OSError):  # what stays is swept later
        if users.make_exclusive():
            _take_away(path, users)
    users.release()


def join(directory: Path, name: str) -> CacheDirectory:
    """Make, or join, what is called `name` in `directory`.

    Raises:
        ConfigError: The directory is another user's, or others may write to it.
        WeightError: There was no joining it.
    """
    path = directory / name
    users = path / _USERS
    for _ in range(_JOINS):
        _check(directory)
        with suppress(FileNotFoundError):  # the last one to leave took it away: once more
            with suppress(FileExistsError):  # not `exist_ok`: it may be gone when that looks again
                path.mkdir(mode=0o700)
            locks.make(users)
            grip = locks.take(users, exclusive=False)
            if grip is None:  # who takes it away has this for the moment that a rename lasts
                threading.Event().wait(_JOIN_PAUSE_S)
            elif grip.is_at(users):
                for lock in (LEADER, *BUFFERS):
                    locks.make(path / lock)
                home = CacheDirectory(path, grip)
                home.touch()
                return home
            else:
                grip.release()
    raise WeightError(
        f"{path} is locked by a process that does not go on. See who it is (`fuser {users}`), "
        "or turn host_cache off."
    )


def sweep(directory: Path, keep: str) -> None:
    """Remove from `directory` what killed processes left there, and nobody used for an hour."""
    with suppress(OSError):  # others sweep as well
        for path in list(directory.iterdir()):
            if path.name.startswith(_GONE):
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != keep and _OURS.fullmatch(path.name):
                _sweep_one(path)


def _sweep_one(path: Path) -> None:
    users = path / _USERS
    with suppress(OSError):
        if time.time() - (users if users.exists() else path).stat().st_mtime < _IDLE_S:
            return
        locks.make(users)
        grip = locks.take(users, exclusive=True)
        if grip is not None:
            _take_away(path, grip)


def _take_away(path: Path, users: locks.FileLock) -> None:
    """Remove what is at `path`, in one step for whoever joins meanwhile; `users` is exclusive."""
    gone = path.with_name(_GONE + uuid.uuid4().hex)
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
            f"{directory} is not a directory of user {os.geteuid()} that only this user may write "
            f"to ({stat.filemode(found.st_mode)}, user {found.st_uid}). Remove it, choose another "
            "directory, or turn host_cache off."
        )
