"""Writes metrics as lines of strict JSON: one object a line, without NaN or Infinity."""

from __future__ import annotations

import json
import math
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from redrb.errors import ConfigError


class MetricsLog:
    """Appends one line for each event; safe among threads.

    Every line has `time` (seconds since the epoch), `worker` and `event`. Numbers that are not
    finite become null, because JSON has none.
    """

    def __init__(self, path: str, *, worker: str) -> None:
        """Open the log.

        Args:
            path: A file that is appended to; "-" is standard output, "" writes nothing.
            worker: Name that each line carries.

        Raises:
            ConfigError: The file cannot be opened.
        """
        self._worker = worker
        self._lock = threading.Lock()
        self._file: IO[str] | None = None
        self._owned = path not in ("", "-")
        if path == "-":
            self._file = sys.stdout
        elif path:
            try:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                self._file = Path(path).open("a", encoding="utf-8")  # noqa: SIM115 (__exit__ closes)
            except OSError as error:
                raise ConfigError(
                    f"no metrics can be written to {path}: {error.strerror}."
                ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._owned and self._file is not None:
            self._file.close()

    def write(self, event: str, **values: object) -> None:
        """Append one event."""
        if self._file is None:
            return
        line = {"time": round(time.time(), 3), "worker": self._worker, "event": event, **values}
        text = json.dumps(_plain(line), allow_nan=False)
        with self._lock:
            self._file.write(text + "\n")
            self._file.flush()


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
