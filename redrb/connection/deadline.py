"""The deadline of a call: its connection attempts, sends, receives and repetitions share it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from redrb.connection.stop_time import StopTime

GRACE_S = 2.0
"""Time that a server has to answer: it may pause, for a fork or a slow disk."""

EXIT_S = 3.0
"""How long the end of the process, or of a client, waits for Redis until all streams are closed."""

_SHORTEST_S = 0.05
"""Timeout of a socket when the deadline has passed: enough for a server that answers at once."""


class _Here(threading.local):
    """The deadlines of a thread; None: it has none."""

    at: float | None = None
    stop: StopTime | None = None


_here = _Here()


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Let this block of this thread end its work with Redis within `seconds`.

    A block within another one has the earlier of both deadlines. Only silence is cut short: a long
    reply that keeps arriving is read to its end.
    """
    before, stop = _here.at, _here.stop
    at = time.monotonic() + seconds
    _here.at = at if before is None else min(before, at)
    if before is None and stop is not None:
        stop.enter()
    try:
        yield
    finally:
        _here.at = before
        if before is None and stop is not None:
            stop.leave()


@contextmanager
def ending_within(stop: StopTime) -> Iterator[None]:
    """Let this block of this thread spend no more than `stop` on Redis, once `stop` has begun.

    In the main thread a request that is under way when the time is up is interrupted.
    """
    if _here.stop is stop:
        yield
        return
    with ExitStack() as scope:
        if threading.current_thread() is threading.main_thread():
            scope.enter_context(stop.watched())
        before, _here.stop = _here.stop, stop
        try:
            yield
        finally:
            _here.stop = before


def interrupts() -> set[Callable[[], None]] | None:
    """Return the functions that interrupt this thread when its time to end is up; None: no time."""
    return None if _here.stop is None else _here.stop.interrupts


def left_s() -> float | None:
    """Return the seconds until the deadline, at least 0; None if there is none."""
    at, stop = _here.at, _here.stop
    left = None if at is None else max(0.0, at - time.monotonic())
    to_end = None if stop is None else stop.left_s
    if left is None or to_end is None:
        return to_end if left is None else left
    return min(left, to_end)


def most_s(seconds: float) -> float:
    """Return `seconds`, or the time until the deadline if that is less."""
    left = left_s()
    return seconds if left is None else min(seconds, left)


def over() -> bool:
    """Return whether the deadline has passed."""
    return left_s() == 0.0


def ended() -> bool:
    """Return whether the time of a process that was asked to end is up."""
    return _here.stop is not None and _here.stop.over


def shortened(timeout: float | None) -> float | None:
    """Return a socket's timeout, cut to what is left until the deadline.

    Where much is left a third of it is used, so that a connection that is frozen costs one attempt
    and not the whole call.
    """
    left = left_s()
    if left is None or timeout is None:
        return timeout
    return min(timeout, max(left, _SHORTEST_S), max(left / 3, GRACE_S))
