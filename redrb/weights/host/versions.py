"""Versions that the processes of a host share: a file or folder each, which never changes."""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from redrb.errors import ConfigError
from redrb.weights.host.locks import FileLock, acquire, acquire_fifo, wait_released

_WRITER = ".lock"
_PART = ".part"


class HostVersions:
    """The versions of one key: one process writes each, and others use it until it is removed.

    A version is written beside, as `<key>.part`, and renamed to `<key>.<name>` when it is complete.
    Whoever writes or removes holds the lock `<key>.lock`, for which other processes wait. The users
    of a version share a lock on it. A version that no process has locked may be removed, or become
    the `<key>.part` of the next one.

    Args:
        directory: Where the versions are.
        key: Begins the name of each file; equal for all processes that share the versions.
        content: The file in each version's folder that is locked; default: versions are files.
    """

    def __init__(self, directory: Path, key: str, content: str = "") -> None:
        self._directory = directory
        self._key = key
        self._content = content
        self._writer = directory / f"{key}{_WRITER}"

    def path(self, name: str) -> Path:
        """Return where a version is, or would be."""
        return self._directory / f"{self._key}.{name}"

    def open(self, name: str) -> FileLock | None:
        """Return the lock of a user of a version; None if the version does not exist."""
        return acquire(self.path(name) / self._content, exclusive=False)

    def use(self, name: str, write: Callable[[Path], None], *, timeout: float) -> FileLock | None:
        """Return the lock of a user of a version, after it was written if it did not exist.

        Args:
            name: Identifies all that is written.
            write: Writes the version to a path; called unless another process writes.
            timeout: Seconds to wait for another process that writes.

        Returns:
            The lock; None if another process has written another version, or failed.

        Raises:
            TimeoutError: Another process did not end in time.
        """
        found = self.open(name)
        if found is not None:
            return found
        writer = acquire_fifo(self._writer)
        if writer is None:
            if not wait_released(self._writer, timeout):
                raise TimeoutError(f"another process still writes {self._writer.stem}.")
            return self.open(name)
        with self._writing(writer) as part:
            found = self.open(name)  # another process was faster
            if found is None:
                write(part)
                found = acquire(part / self._content, exclusive=False)
                part.rename(self.path(name))
        return found

    def unused(self) -> Iterator[Path]:
        """Yield each version that no process uses, locked until the next one; for `write`."""
        for path in self._directory.glob(f"{self._key}.*"):
            if path.suffix not in (_WRITER, _PART):
                lock = acquire(path / self._content, exclusive=True)
                if lock is not None:
                    yield path
                    lock.release()

    def remove_unused(self, *, timeout: float = 0.0) -> None:
        """Remove the versions that no process uses, and what a killed writer has left."""
        ends = time.monotonic() + timeout
        while (writer := acquire_fifo(self._writer)) is None:
            left = ends - time.monotonic()
            if left <= 0 or not wait_released(self._writer, left):
                return
        with self._writing(writer) as part:
            for path in self.unused():
                path.rename(part)  # a kill leaves no half of a folder that looks like a version
                _delete(part)

    @contextmanager
    def _writing(self, writer: FileLock) -> Iterator[Path]:
        part = self._directory / f"{self._key}{_PART}"
        try:
            _delete(part)  # left by a process that was killed
            yield part
        finally:
            _delete(part)
            # who waits for this FIFO learns of the end even if another one is made at once
            self._writer.unlink(missing_ok=True)
            writer.release()


def make_private(directory: Path) -> None:
    """Create a directory to which only this user may write, unless it exists."""
    with suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise ConfigError(
            f"{directory} is not a directory that only user {os.geteuid()} may write to "
            f"({stat.filemode(found.st_mode)}, user {found.st_uid}). Delete it, or leave "
            "host_cache out."
        )


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
