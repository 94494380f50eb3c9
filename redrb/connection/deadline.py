"""The deadline of a call: its connection attempts, sends, receives and repetitions share it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

GRACE_S = 2.0
"""Time that a server has to answer: it may pause, for a fork or a slow disk."""

_SHORTEST_S = 0.05
"""Timeout of a socket when the deadline has passed: enough for a server that answers at once."""

_here = threading.local()


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Let this block of this thread end its work with Redis within `seconds`.

    A block within another one has the earlier of both deadlines. Only silence is cut short: a long
    reply that keeps arriving is read to its end.
    """
    before: float | None = getattr(_here, "at", None)
    at = time.monotonic() + seconds
    _here.at = at if before is None else min(before, at)
    try:
        yield
    finally:
        _here.at = before


def left_s() -> float | None:
    """Return the seconds until the deadline, at least 0; None if there is none."""
    at: float | None = getattr(_here, "at", None)
    return None if at is None else max(0.0, at - time.monotonic())


def over() -> bool:
    """Return whether the deadline has passed."""
    return left_s() == 0.0


def shortened(timeout: float | None) -> float | None:
    """Return a socket's timeout, cut to what is left until the deadline.

    Where much is left a third of it is used, so that a connection that is frozen costs one attempt
    and not the whole call.
    """
    left = left_s()
    if left is None or timeout is None:
        return timeout
    return min(timeout, max(left, _SHORTEST_S), max(left / 3, GRACE_S))
