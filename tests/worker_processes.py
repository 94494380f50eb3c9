"""Makers and trainers of the recipe `sorting` as processes, whose metrics are read line by line."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from typing import Any

from redrb.environment import PREFIX, child_environment
from tests import warm


class WorkerProcess:
    """One worker.

    Attributes:
        popen: The process; its stacks are written at SIGABRT.
    """

    def __init__(self, url: str, module: str, *arguments: str) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by `kill`)
        command = [sys.executable, "-X", "faulthandler", "-m", module, "sorting", "--metrics", "-"]
        self.popen = warm.Popen(
            [*command, *arguments],
            env=child_environment(without=PREFIX, REDRB_URL=url),
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def error_output(self) -> str:
        """Return what it wrote to standard error, after its end."""
        self._errors.seek(0)
        return self._errors.read()

    def until(self, event: str, count: int = 1) -> list[dict[str, Any]]:
        """Read metrics until `event` came `count` times; returns these."""
        found: list[dict[str, Any]] = []
        for line in self.popen.stdout:
            record = json.loads(line)
            if record["event"] == event:
                found.append(record)
                if len(found) == count:
                    return found
        raise AssertionError(f"it ended before event {event!r} came {count} times")

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal, read what is left and return the exit status."""
        self.popen.send_signal(number)
        self.popen.communicate(timeout=30)
        return self.popen.returncode

    def kill(self) -> None:
        """End it."""
        self.popen.kill()
        self.popen.communicate()
        self._errors.close()
