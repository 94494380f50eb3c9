"""Worker processes of the demo: started with the commands that a cluster uses, and ended."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from redrb.environment import PREFIX, child_environment

STOP_TIMEOUT_S = 10.0
"""Seconds that a worker may spend on Redis after SIGTERM."""

GRACE_S = STOP_TIMEOUT_S + 5.0
"""Seconds that workers have to end after SIGTERM."""

OnEvent = Callable[[Mapping[str, Any]], None]


class Worker:
    """One worker process; a thread passes its metrics to `on_event`.

    Attributes:
        name: Its name on the screen and in file names.
        command: The arguments after `python -m`.
    """

    def __init__(
        self, name: str, command: list[str], url: str, logs: Path, on_event: OnEvent
    ) -> None:
        self.name = name
        self.command = command
        self._errors = (logs / f"{name}.err").open("w+", encoding="utf-8")
        self._metrics = (logs / f"{name}.jsonl").open("w", encoding="utf-8")
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", *command, "--metrics", "-"),
                *("--stop-timeout", f"{STOP_TIMEOUT_S}"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            # the URL may have a password, so it is not an argument; redrb's other variables are not
            # inherited, so that settings for other runs do not change this one
            env=child_environment(without=PREFIX, REDRB_URL=url),
            start_new_session=True,  # the demo handles Ctrl-C, and sends SIGTERM to the workers
        )
        self._terminated = False
        self._reader = threading.Thread(target=self._read, args=(on_event,), daemon=True)
        self._reader.start()

    @property
    def running(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None

    def wait(self, timeout: float) -> bool:
        """Wait for the process; returns whether it ended in time."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True

    def terminate(self) -> None:
        """Send SIGTERM."""
        if self.running:
            self._terminated = True
            self._process.terminate()

    def end(self, timeout: float) -> tuple[int, str]:
        """Wait for the process, or kill it; returns exit status and the end of its error output.

        The status is 0 also if SIGTERM came before the worker was ready to handle it.
        """
        if not self.wait(timeout):
            self._process.kill()
            self._process.wait()
        self._reader.join(timeout)
        self._errors.seek(0)
        errors = self._errors.read()
        self._errors.close()
        self._metrics.close()
        status = self._process.returncode
        return 0 if self._terminated and status == -signal.SIGTERM else status, errors[-2000:]

    def _read(self, on_event: OnEvent) -> None:
        output: IO[str] | None = self._process.stdout
        if output is None:
            return
        with output:
            for line in output:
                self._metrics.write(line)
                self._metrics.flush()
                on_event(json.loads(line))
