"""A process with many clients that do next to nothing, as makers do during long generations."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

import redrb
from benchmarks.processes import Worker, started

PERIOD_S = 10.0
"""Each client asks for the ledger of its task once in this time."""


class IdleClients:
    """Clients with a connection and an open task each."""

    def __init__(self, url: str, count: int) -> None:
        self._streams = [
            redrb.ExperienceStream(redrb.connect(url), f"idle-{number % 16}")
            for number in range(count)
        ]
        Thread(target=self._idle, daemon=True).start()

    def _idle(self) -> None:
        """Let one client after the other do something."""
        for stream in itertools.cycle(self._streams):
            stream.stats()
            time.sleep(PERIOD_S / len(self._streams))


@contextmanager
def idle_clients(url: str, count: int) -> Iterator[None]:
    """Keep so many clients while the block runs."""
    with started([lambda: Worker(IdleClients, url, count)]):
        yield
