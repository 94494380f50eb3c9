"""Journals of workers: a line of JSON before and after each call, which a SIGKILL cannot take back.

Each line is one write to a file opened with O_APPEND: when the process dies, the kernel has it.
Times are those of CLOCK_MONOTONIC, which all processes of a host share.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Journal:
    """The journal of one worker."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._calls = 0

    def write(self, kind: str, **data: Any) -> None:
        """Append a line."""
        line = json.dumps({"k": kind, "t": time.monotonic(), **data}, separators=(",", ":"))
        os.write(self._file, line.encode() + b"\n")

    @contextmanager
    def call(self, op: str, limit: float, **data: Any) -> Iterator[dict[str, Any]]:
        """Write a line before a call, and one after it with its error and the outcome yielded.

        Args:
            op: Name of the call.
            limit: Seconds within which it promises to end.
            data: What the call is about to do.
        """
        self._calls += 1
        number, outcome = self._calls, dict[str, Any]()
        self.write("begin", n=number, op=op, limit=limit, **data)
        try:
            yield outcome
        except Exception as error:
            named = {"error": type(error).__name__, "message": str(error)[:200]}
            self.write("end", n=number, **{**named, **outcome})
            raise
        self.write("end", n=number, **outcome)


def read(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a journal; a last line that was not written whole is left out."""
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
