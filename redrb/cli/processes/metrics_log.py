"""Metrics as lines of strict JSON, in files of records that may be lost without harm."""

from __future__ import annotations

import json
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

from redrb.errors import ConfigError
from redrb.scopes import Entered
from redrb.staging import may_pass

Say = Callable[[str], None]


class RecordFile:
    """Appends output to a file; lines that the disk does not take are dropped.

    A full or read-only disk of logs must not end the job that writes them. The first line that is
    dropped is reported, and later lines are tried again. Safe among threads.
    """

    def __init__(self, path: Path, say: Say) -> None:
        """Open the file, if the disk allows it now.

        `say` is called when a line is dropped for the first time, in the thread that writes.

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
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("ab", buffering=0)
            if self._path.is_file():  # a pipe has no end to look at
                with self._path.open("rb") as written:
                    size = written.seek(0, 2)
                    written.seek(max(0, size - 1))
                    self._torn = written.read(1) not in (b"", b"\n")
        return self._file

    def _dropped(self, error: OSError) -> None:
        if not self._said:
            self._said = True
            self._say(
                f"lines for {self._path} are dropped, and the job goes on: {error.strerror}. Make "
                "room on the disk, or make it writable: later lines are kept again."
            )


_log = logging.getLogger("redrb")


class MetricsLog(Entered):
    """Appends one line for each event; safe among threads.

    Lines of a file that the disk does not take are dropped, and the first one is reported.

    Every line has `time` (seconds since the epoch), `worker` and `event`. Numbers that are not
    finite become null, because JSON has none.
    """

    def __init__(self, path: str, *, worker: str, say: Say = _log.warning) -> None:
        """Open the log; `say` is called when a line is dropped for the first time.

        Raises:
            ConfigError: The file cannot be opened, and not because its disk is full or read-only.
        """
        self._worker = worker
        self._file: RecordFile | None = None
        self._prints, self._printing = path == "-", threading.Lock()
        if path and not self._prints:
            self._file = RecordFile(Path(path), say)

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def write(self, event: str, **values: object) -> None:
        """Append one event."""
        line = {"time": round(time.time(), 3), "worker": self._worker, "event": event, **values}
        text = json.dumps(_plain(line), allow_nan=False) + "\n"
        if self._file is not None:
            self._file.write(text.encode())
        elif self._prints:
            with self._printing:
                sys.stdout.write(text)
                sys.stdout.flush()


def _plain(value: object) -> object:
    """Return a value as JSON knows it: a tensor of one number as a number, other objects as text.

    Numbers that are not finite become None.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        return str(value)
    return number if math.isfinite(number) else None
