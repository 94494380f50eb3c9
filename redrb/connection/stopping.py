"""Ends the waits of a thread early: for Redis that is away, for a batch, for room."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue


class Stop:
    """Asks a thread that works in `stoppable(stop)` to wait no longer.

    `ask` may be called from anywhere, also while garbage is collected. A `threading.Event` would
    not do: the collecting thread may hold its lock.
    """

    def __init__(self) -> None:
        self._asked = False
        self._wakes: SimpleQueue[None] = SimpleQueue()

    @property
    def asked(self) -> bool:
        """Whether `ask` was called."""
        return self._asked

    def ask(self) -> None:
        """Ask; it cannot be taken back."""
        self._asked = True
        self._wakes.put(None)

    def wait(self, seconds: float) -> bool:
        """Wait for a call of `ask`, but not longer than `seconds`; returns whether it came."""
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

    A failed request is then not repeated, and a wait times out at its next check: within a second,
    or when a connection attempt has timed out.
    """
    before = getattr(_here, "stop", None)
    _here.stop = stop
    try:
        yield
    finally:
        _here.stop = before


def stoppable_here() -> bool:
    """Return whether this thread works in `stoppable`."""
    return getattr(_here, "stop", None) is not None


def asked() -> bool:
    """Return whether this thread should wait no longer."""
    stop: Stop | None = getattr(_here, "stop", None)
    return stop is not None and stop.asked


def pause(seconds: float) -> None:
    """Wait between two attempts of a request, or until the thread is asked to stop."""
    stop: Stop | None = getattr(_here, "stop", None)
    if stop is None:
        time.sleep(seconds)  # noqa: TID251 (the pause of a retry, whose length is the point)
    else:
        stop.wait(seconds)
