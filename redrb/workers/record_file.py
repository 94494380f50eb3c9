"""`RecordFile`: a file of records that may be lost without harm, such as a log or metrics."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO

from redrb.disks import may_pass
from redrb.errors import ConfigError

Say = Callable[[str], None]


class RecordFile:
    """Appends output to a file; lines that the disk does not take are dropped.

    A full or read-only disk of logs must not end the job that writes them. The first line that is
    dropped is reported, and later lines are tried again. Safe among threads.
    """

    def __init__(self, path: Path, say: Say) -> None:
        """Open the file, if the disk allows it now.

        Args:
            path: The file. A torn last line in it, of a process that was killed, ends first.
            say: Called with a message when a line is dropped for the first time, in the thread
                that writes.

        Raises:
            ConfigError: The file cannot be opened, and not because its disk is full or read-only.
        """
        self._path, self._say = path, say
        self._lock = threading.Lock()
        self._file: IO[bytes] | None = None
        self._closed = self._torn = self._said = False
        try:
            self._open()
        except OSError as error:
            if not may_pass(error):
                raise ConfigError(f"{path} cannot be written: {error.strerror}.") from error
            self._dropped(error)

    def write(self, lines: bytes) -> None:
        """Append output, or drop it; after `close` nothing is written."""
        with self._lock:
            if self._closed:
                return
            try:
                file = self._open()
                if self._torn:
                    self._torn = not file.write(b"\n")
                self._torn = True  # until all of it is written
                written = file.write(lines)
                if written < len(lines):
                    file.write(lines[written:])  # raises the reason
                self._torn = False
            except OSError as error:
                self._dropped(error)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._closed = True
            if self._file is not None:
                self._file.close()

    def _open(self) -> IO[bytes]:
        if self._file is None:
            self._file = self._path.open("ab", buffering=0)
            self._torn = _is_torn(self._path)
        return self._file

    def _dropped(self, error: OSError) -> None:
        if not self._said:
            self._said = True
            self._say(
                f"lines for {self._path} are dropped, and the job goes on: {error.strerror}. Make "
                "room on the disk, or make it writable: later lines are kept again."
            )


def _is_torn(path: Path) -> bool:
    """Return whether the last line of a file lacks its end."""
    if not path.is_file():  # a pipe, which has no end to look at
        return False
    with path.open("rb") as written:
        if not written.seek(0, 2):
            return False
        written.seek(-1, 2)
        return written.read(1) != b"\n"
