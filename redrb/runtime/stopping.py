"""How a loop is asked to end: by a call of `stop`, or by SIGTERM and Ctrl-C while it runs."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from redrb.checks import checked_number
from redrb.connection.stop_time import StopTime
from redrb.connection.stopping import Stop
from redrb.errors import ConfigError

STOP_TIMEOUT_S = 20.0
"""Default of the seconds that a process may spend on Redis after a signal."""


def checked_stop_seconds(name: str, value: object) -> float:
    """Return seconds that a process has after a signal.

    Raises:
        ConfigError: `value` is no number from 0 to the longest wait of a thread.
    """
    seconds = checked_number(name, value)
    if not 0 <= seconds <= threading.TIMEOUT_MAX:
        raise ConfigError(f"{name}={value!r:.80}: give seconds, 0 or more.")
    return seconds


@contextmanager
def leaving_on_signals() -> Iterator[None]:
    """In this block SIGTERM and Ctrl-C end the process with status 0.

    For the start of a process, before it leases or makes anything. Main thread only.
    """
    numbers = (signal.SIGTERM, signal.SIGINT)
    # an exception would not do: one that is raised during garbage collection is lost
    before = [signal.signal(number, lambda *_: os._exit(0)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


class StopRequest:
    """A request that a loop ends after its current step; true once someone has asked.

    Attributes:
        reason: Why the loop was asked to end; "" before.
        by_signal: Whether a signal was the first to ask.
        waits: Ends the waits of a thread that works in `stoppable(request.waits)`.
        time: Time that is left for Redis once a signal has come.
    """

    def __init__(self, stop_timeout: float = STOP_TIMEOUT_S) -> None:
        """Make a request that nobody has asked yet.

        Args:
            stop_timeout: Seconds that the process may spend on Redis after a signal.
        """
        self.reason = ""
        self.by_signal = False
        self.waits = Stop()
        self.time = StopTime(stop_timeout)
        self._wake: Callable[[], None] | None = None

    def __bool__(self) -> bool:
        return bool(self.reason)

    def ask(self, reason: str) -> None:
        """Ask the loop to end; the first reason is kept. A signal handler may call it."""
        if not self.reason:
            self.reason = reason or "it was asked to"
            self.waits.ask()
            if self._wake is not None:
                self._wake()

    def postponed(self) -> StopRequest:
        """Return a request that is never asked, and shares the time of this one.

        For a wait that a signal must not end as long as there is time, as that of a rank.
        """
        never = StopRequest()
        never.time = self.time
        return never

    @contextmanager
    def waking(self, wake: Callable[[], None]) -> Iterator[None]:
        """In this block, call `wake` when the loop is asked to end; it must not block."""
        self._wake = wake
        try:
            yield
        finally:
            self._wake = None

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """In this block SIGTERM and Ctrl-C ask the loop to end; a second one ends the process.

        Only the main thread can handle signals: in other threads this does nothing.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before: dict[int, Any] = {}

        def handle(number: int, _frame: FrameType | None) -> None:
            self.by_signal = self.by_signal or not self
            self.ask(signal.Signals(number).name)
            self.time.begin()
            for each, handler in before.items():
                signal.signal(each, handler)

        for handled in (signal.SIGTERM, signal.SIGINT):
            before[handled] = signal.signal(handled, handle)
        try:
            yield
        finally:
            for number, handler in before.items():
                if signal.getsignal(number) is handle:
                    signal.signal(number, handler)
