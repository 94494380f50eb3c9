"""A server whose clock a test sets forward and back, by the library libfaketime."""

from __future__ import annotations

import os
from pathlib import Path

from tests.servers import Server
from tests.tools import need

SHARED_MEMORY = Path("/dev/shm")


class ClockedServer(Server):
    """A server whose wall clock differs from the machine's; its timers are the machine's."""

    def __init__(self, program: str, *arguments: str) -> None:
        self._library = need("libfaketime")
        super().__init__(program, *arguments)

    def environment(self) -> dict[str, str]:
        self._offset = self.directory / "offset"
        self._offset.write_text("+0s\n")
        return {
            **os.environ,
            "LD_PRELOAD": self._library,
            "FAKETIME_TIMESTAMP_FILE": str(self._offset),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    def kill(self) -> None:
        """End the server with SIGKILL, and remove what libfaketime leaves then."""
        super().kill()
        remove_shared_memory(self.pid)

    def set_clock(self, offset_s: int) -> None:
        """Let the server's clock be `offset_s` ahead of the machine's."""
        changed = self._offset.with_suffix(".new")
        changed.write_text(f"{offset_s:+d}s\n")
        changed.replace(self._offset)


def remove_shared_memory(pid: int) -> None:
    """Remove the memory and the semaphore of libfaketime in a process that was killed."""
    for name in (f"faketime_shm_{pid}", f"sem.faketime_sem_{pid}"):
        (SHARED_MEMORY / name).unlink(missing_ok=True)
