"""`staging`: a folder for incomplete files; those that killed processes left are deleted."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

_MAY_PASS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE}
)


def may_pass(error: OSError) -> bool:
    """Return whether the same file may be written later: the disk is full, read-only or failing."""
    return error.errno in _MAY_PASS


_RANDOM = re.compile(r"[0-9a-f]{32}")
_LOCK = "lock"
_WITHOUT_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EBADF)


@contextmanager
def staging(target: Path) -> Iterator[Path]:
    """Make a folder beside `target` in which it is written, and delete the folder at the end.

    The folder has a lock that ends with its process: before, the folders for `target` of processes
    that were killed are deleted. On file systems without locks nothing of other processes is.

    Raises:
        OSError: The folder cannot be made.
    """
    for folder in staging_folders(target):
        _delete_abandoned(folder)
    folder, lock = _locked_folder(target)
    with lock:
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def replacing(target: Path, *, staged: Path | None = None) -> Iterator[IO[bytes]]:
    """Open a new file that replaces `target` after the block, and survives a crash of the machine.

    It is written in a folder of `staging` for `staged`, or else for `target`. If the block raises,
    `target` is unchanged.

    Raises:
        OSError: It cannot be written.
    """
    with staging(staged or target) as folder:
        fresh = folder / "part"
        with fresh.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(target)
    sync_folder(target.parent)


def check_writable(folder: Path, name: str) -> None:
    """Make a folder, and in it what `staging` makes for the file `name`.

    Raises:
        OSError: No file can be written there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with staging(folder / name):
        pass


def staging_folders(target: Path) -> list[Path]:
    """Return the folders in which processes write `target`."""
    prefix = f".{target.name}."
    return [
        found
        for found in target.parent.iterdir()
        if found.name.startswith(prefix) and _RANDOM.fullmatch(found.name, len(prefix))
    ]


def sync_folder(folder: Path) -> None:
    """Let the names in a folder survive a crash of the machine."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _locked_folder(target: Path) -> tuple[Path, IO[bytes]]:
    while True:
        folder = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
        folder.mkdir()
        try:
            lock = (folder / _LOCK).open("xb")
        except (FileExistsError, FileNotFoundError):  # another process deletes the folder
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # the same
            lock.close()
            continue
        except OSError as error:
            if error.errno not in _WITHOUT_LOCKS:
                lock.close()
                raise
        if os.fstat(lock.fileno()).st_nlink:
            return folder, lock
        lock.close()


def _delete_abandoned(folder: Path) -> None:
    """Delete a folder whose process has ended."""
    try:
        lock = (folder / _LOCK).open("ab")  # made here if its process was killed before
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return  # its process is done, or it is no such folder, or it is another user's
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # its process is still writing, or there are no locks
            return
        shutil.rmtree(folder, ignore_errors=True)
