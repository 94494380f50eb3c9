"""One worker process: started with the command that a cluster uses; its output is kept."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

OnEvent = Callable[[Mapping[str, Any]], None]

REASON_LINES = 20
"""Lines of error output that are kept as the reason of a death."""

BRIEF_LINES = 3
"""Lines of the log that are shown when a process is started again."""

LOG_ENDS = "last lines of its log:"

_REASON_BYTES = 8_000
_PART_BYTES = 65_536
_DRAIN_S = 2.0
"""Longest wait for output after a process ended: a child of it may hold the pipe open."""


@dataclass(frozen=True)
class Death:
    """The end of a process.

    Attributes:
        status: Its exit status; below 0 the signal that killed it. It is 0 also if SIGTERM was
            sent before the process could handle it.
        reason: The end of its error output.
        explains: Whether the last line of it says why it ended, as that of a trace does.
        how: How it ended, in words, if the status does not say it.
    """

    status: int
    ran_s: float
    reason: str
    explains: bool = True
    pid: int = 0
    how: str = ""

    @property
    def why(self) -> str:
        """The status in words."""
        if self.how:
            return self.how
        if self.status == -signal.SIGKILL:
            return (
                "was killed by SIGKILL (by the kernel if the machine ran out of memory, or by "
                "someone)"
            )
        if self.status < 0:
            return f"was killed by {signal.Signals(-self.status).name}"
        return f"ended with status {self.status}"

    @property
    def detail(self) -> str:
        """Error output as the reason, or, after a signal, only as the last lines of the log."""
        if not self.reason or (self.explains and self.status > 0):
            return self.reason
        return f"{LOG_ENDS}\n{self.reason}"

    @property
    def brief(self) -> str:
        """The detail in short: its last line, or the last lines of the log; "" without any."""
        lines = [line for line in self.reason.splitlines() if line.strip()]
        if not lines:
            return ""
        if self.explains and self.status > 0:
            return f": {lines[-1]}"
        return "\n".join([f"; {LOG_ENDS}", *(f"  {line}" for line in lines[-BRIEF_LINES:])])


OnEnd = Callable[[Death], None]


class Output(Protocol):
    """Where output of a worker goes."""

    def write(self, lines: bytes, /) -> None:
        """Append it."""

    def close(self) -> None:
        """Write nothing after this."""


class WorkerProcess:
    """A running worker; one thread passes its events on, another one its end.

    Standard output has events as JSON lines, which are appended to a file of metrics. What else a
    recipe prints goes to the log, as standard error does.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        metrics: Output,
        log: Output,
        on_event: OnEvent,
        on_end: OnEnd,
        lock: int | None = None,
    ) -> None:
        """Start the process.

        The files are closed at its end. `on_event` and `on_end` are called in threads; the process
        holds the lock of the descriptor `lock` until it has ended.
        """
        self._metrics, self._log = metrics, log
        self._log.write(f"--- {time.strftime('%F %T')} python -m {' '.join(command)}\n".encode())
        self._last_errors = b""
        self._started = time.monotonic()
        self._terminated = False
        self._process = subprocess.Popen(
            [sys.executable, "-m", "redrb.cli.processes.supervised", *command],
            stdin=subprocess.PIPE,  # it closes with this process, which ends the worker
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,  # not the log: a full disk must not fail what a worker prints
            env=dict(environment),
            pass_fds=() if lock is None else (lock,),
            start_new_session=True,  # Ctrl-C reaches only `redrb run`, which sends SIGTERM
        )
        self.ended = threading.Event()
        self._readers = [
            threading.Thread(target=self._read_events, args=(on_event,), daemon=True),
            threading.Thread(target=self._read_errors, daemon=True),
        ]
        self._waiter = threading.Thread(target=self._wait, args=(on_end,), daemon=True)
        for thread in (*self._readers, self._waiter):
            thread.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def terminate(self) -> None:
        """Send SIGTERM, unless it has ended."""
        if not self.ended.is_set():
            self._terminated = True
            self._process.terminate()

    def kill(self) -> None:
        """Send SIGKILL, unless it has ended."""
        self._process.kill()

    def _wait(self, on_end: OnEnd) -> None:
        status = self._process.wait()
        ran_s = time.monotonic() - self._started
        if self._process.stdin is not None:
            self._process.stdin.close()
        until = time.monotonic() + _DRAIN_S
        for reader in self._readers:
            reader.join(max(0.0, until - time.monotonic()))
        if self._terminated and status == -signal.SIGTERM:
            status = 0
        self._metrics.close()
        self._log.close()
        lines = self._last_errors.decode(errors="replace").strip().splitlines()
        reason = "\n".join(lines[-REASON_LINES:])
        on_end(Death(status, ran_s, reason, pid=self.pid))
        self.ended.set()

    def _read_events(self, on_event: OnEvent) -> None:
        output: Any = self._process.stdout
        with output:
            for line in output:
                event = event_in(line)
                if event is None:
                    self._log.write(line)
                else:
                    self._metrics.write(line)
                    on_event(event)

    def _read_errors(self) -> None:
        output: Any = self._process.stderr
        with output:
            while part := output.read1(_PART_BYTES):
                self._log.write(part)
                self._last_errors = (self._last_errors + part)[-_REASON_BYTES:]


def event_in(line: bytes) -> Mapping[str, Any] | None:
    """Return the event in a line of output; None: something else, or the torn line of a killing."""
    if not (line.startswith(b"{") and line.endswith(b"\n")):
        return None
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return (
        found if isinstance(found, dict) and found.keys() >= {"time", "worker", "event"} else None
    )
