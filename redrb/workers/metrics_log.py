"""Writes metrics as lines of strict JSON: one object a line, without NaN or Infinity."""

from __future__ import annotations

import json
import logging
import math
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from redrb.errors import ConfigError
from redrb.workers.record_file import RecordFile, Say

_log = logging.getLogger("redrb")


class MetricsLog:
    """Appends one line for each event; safe among threads.

    Lines of a file that the disk does not take are dropped, and the first one is reported.

    Every line has `time` (seconds since the epoch), `worker` and `event`. Numbers that are not
    finite become null, because JSON has none.
    """

    def __init__(self, path: str, *, worker: str, say: Say = _log.warning) -> None:
        """Open the log.

        Args:
            path: A file that is appended to; "-" is standard output, "" writes nothing.
            worker: Name that each line carries.
            say: Called with a message when a line is dropped for the first time.

        Raises:
            ConfigError: The file cannot be opened, and not because its disk is full or read-only.
        """
        self._worker = worker
        self._file: RecordFile | None = None
        self._prints, self._printing = path == "-", threading.Lock()
        if path and not self._prints:
            try:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(
                    f"no metrics can be written to {path}: {error.strerror}."
                ) from error
            self._file = RecordFile(Path(path), say)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
