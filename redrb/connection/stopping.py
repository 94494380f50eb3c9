"""A wish that a thread ends its waiting: for Redis that is away, for a batch, for room."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue


class Stop:
    """A wish to stop that one thread heeds while it works in `stoppable(stop)`.

    `ask` may be called from anywhere, also while garbage is collected; that is why this is no
    `threading.Event`, whose lock the collecting thread may hold itself.
    """

    def __init__(self) -> None:
        self._asked = False
        self._wakes: SimpleQueue[None] = SimpleQueue()

    @property
    def asked(self) -> bool:
        """Whether somebody has asked."""
        return self._asked

    def ask(self) -> None:
        """Ask; it cannot be taken back."""
        self._asked = True
        self._wakes.put(None)

    def wait(self, seconds: float) -> bool:
        """Wait until somebody asks, so long at most; returns whether somebody has."""
        if not self._asked:
            try:
                self._wakes.get(timeout=seconds)
            except Empty:
                return self._asked
        return True


_here = threading.local()


@contextmanager
def stoppable(stop: Stop) -> Iterator[None]:
    """Let `stop` end the waits of this thread in this block.

    A request that failed is then not tried again, and a wait's time is up at its next look: within
    a second, or when a connection attempt has timed out.
    """
    before = getattr(_here, "stop", None)
    _here.stop = stop
    try:
        yield
    finally:
        _here.stop = before


def asked() -> bool:
    """Return whether this thread should wait no longer."""
    stop: Stop | None = getattr(_here, "stop", None)
    return stop is not None and stop.asked


def pause(seconds: float) -> None:
    """Wait between two attempts."""
    stop: Stop | None = getattr(_here, "stop", None)
    if stop is None:
        time.sleep(seconds)  # noqa: TID251 (the pause of a retry, whose length is the point)
    else:
        stop.wait(seconds)
