"""`VersionFolders`: folders of weights that the makers of one machine share."""

from __future__ import annotations

import shutil
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from redrb.weights.host.locks import FileLock, acquire, create, wait_released

_WRITE_S = 600.0
"""Longest wait for another process that writes a version."""


class VersionFolders:
    """Writes each version once, and removes those that no process of this machine uses.

    Beside each folder lies a lock: its users share it, and who writes or removes the folder has it
    alone. Folders of other machines on a common file system are left alone.
    """

    def __init__(self, root: Path) -> None:
        """Note where the folders are."""
        self._root = root
        self._prefix = f"{socket.gethostname()}."
        self._used: FileLock | None = None

    def use(self, name: str, write: Callable[[Path], None]) -> Path:
        """Return the folder of a version; it stays until the next call in this process.

        Args:
            name: Identifies the version and everything that is written.
            write: Writes it into a folder; called unless another process has done so.

        Raises:
            OSError: The folder could not be written, or another process did not do so in time.
        """
        self._root.mkdir(parents=True, exist_ok=True)
        path = self._root / f"{self._prefix}{name}"
        before, self._used = self._used, self._shared(path, write)
        if before is not None:
            before.release()
        self._remove_unused()
        return path

    def _shared(self, path: Path, write: Callable[[Path], None]) -> FileLock:
        """Return the shared lock of a folder, after it was written if it did not exist."""
        at = path.with_name(f"{path.name}.lock")
        ends = time.monotonic() + _WRITE_S
        while time.monotonic() < ends:
            create(at)
            with suppress(FileNotFoundError):  # another process has just removed it
                missing = not path.exists()
                lock = acquire(at, exclusive=missing)
                if lock is None:
                    wait_released(at, 1.0)
                    continue
                with ExitStack() as scope:
                    scope.callback(lock.release)
                    if not lock.is_at(at):
                        continue
                    if missing and not path.exists():
                        _write(path, write)
                    elif not missing and path.exists():
                        scope.pop_all()
                        return lock
        raise TimeoutError(f"another process did not write {path} in {_WRITE_S:g} s.")

    def _remove_unused(self) -> None:
        for at in self._root.glob(f"{self._prefix}*.lock"):
            with suppress(FileNotFoundError):
                lock = acquire(at, exclusive=True)
                if lock is not None:
                    for suffix in ("", ".part"):
                        shutil.rmtree(at.with_suffix(suffix), ignore_errors=True)
                    at.unlink()
                    lock.release()


def _write(path: Path, write: Callable[[Path], None]) -> None:
    part = path.with_name(f"{path.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # left by a process that was killed here
    try:
        part.mkdir()
        write(part)
        part.rename(path)
    finally:
        shutil.rmtree(part, ignore_errors=True)
