"""`Stop`: asks threads to wait no longer, and a process to end its work with Redis in time."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any

from redrb.checks import checked_number
from redrb.errors import ConfigError

STOP_TIMEOUT_S = 20.0
"""Default of the seconds that a process may spend on Redis after a signal."""

_LOOK_AGAIN_S = 0.1
"""Shortest pause between two looks whether the time is up."""

_END_S = 2.0
"""Longest wait of `end` for a thread, which may work at something else than a request."""


def checked_stop_seconds(name: str, value: object) -> float:
    """Return seconds that a process has after a signal.

    Raises:
        ConfigError: `value` is no number from 0 to the longest wait of a thread.
    """
    seconds = checked_number(name, value)
    if not 0 <= seconds <= threading.TIMEOUT_MAX:
        raise ConfigError(f"{name}={value!r:.80}: give seconds, 0 or more.")
    return seconds


class Stop:
    """Asks for an end; true once someone has asked, which cannot be taken back.

    A thread that works in `Deadline(stop=stop)` waits no longer then. After a signal a thread that
    works in `Deadline(budget=stop)` has a number of seconds for Redis, all such blocks together.
    Time between requests does not count: a training step or a checkpoint that is under way is
    finished, and the requests after it have all of the time. A request that is under way when the
    time is up is interrupted by its entry in `interrupts`.

    Attributes:
        reason: Why the end was asked for; "" before.
        by_signal: Whether a signal was the first to ask.
        interrupts: Functions that are called when the time is up, perhaps more than once.
    """

    def __init__(self, seconds: float = math.inf) -> None:
        """Make a stop that nobody has asked yet, with seconds on Redis after a signal."""
        self.reason = ""
        self.by_signal = False
        self.interrupts: set[Callable[[], None]] = set()
        self._left = seconds
        self._begun_at: float | None = None
        self._entered_at: float | None = None
        self._wake: Callable[[], None] | None = None
        # no `threading.Event`: `ask` is called while garbage is collected, and the collecting
        # thread may hold the lock of one
        self._asked: SimpleQueue[None] = SimpleQueue()
        self._wakes: SimpleQueue[bool] = SimpleQueue()

    def __bool__(self) -> bool:
        return bool(self.reason)

    def ask(self, reason: str = "") -> None:
        """Ask; the first reason is kept. A signal handler and a finalizer may call it."""
        if not self.reason:
            self.reason = reason or "it was asked to"
            self._asked.put(None)
            if self._wake is not None:
                self._wake()

    def wait(self, seconds: float) -> bool:
        """Wait for a call of `ask`, but not longer than `seconds`; returns whether it came."""
        if not self:
            try:
                self._asked.get(timeout=seconds)
                self._asked.put(None)  # for the next one that waits
            except Empty:
                return bool(self)
        return True

    @contextmanager
    def waking(self, wake: Callable[[], None]) -> Iterator[None]:
        """In this block, call `wake` when the end is asked for; it must not block."""
        self._wake = wake
        try:
            yield
        finally:
            self._wake = None

    def begin(self) -> None:
        """Begin to count the time; a signal handler may call it, also a second time."""
        if self._begun_at is None:
            self._begun_at = time.monotonic()
            self._wakes.put(True)

    @property
    def left_s(self) -> float:
        """Seconds that are left for Redis; infinite before `begin`."""
        if self._begun_at is None:
            return math.inf
        entered = self._entered_at
        used = 0.0 if entered is None else time.monotonic() - max(entered, self._begun_at)
        return max(0.0, self._left - used)

    def enter(self) -> None:
        """Note that the thread begins to work with Redis."""
        self._entered_at = time.monotonic()

    def leave(self) -> None:
        """Note that it has ended this work."""
        left = self.left_s
        self._entered_at = None
        if self._begun_at is not None:
            self._left = min(self._left, left)  # `begin` may have come since `left` was read

    @contextmanager
    def watched(self) -> Iterator[None]:
        """In this block, let a thread interrupt what is under way when the time is up."""
        watcher = threading.Thread(target=self._watch, name="redrb-stop", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            self._wakes.put(False)
            watcher.join()

    def _watch(self) -> None:
        while self._begun_at is None:
            if not self._wakes.get():  # the block has ended
                return
        goes_on = True
        while goes_on:
            seconds = min(max(self.left_s, _LOOK_AGAIN_S), threading.TIMEOUT_MAX)
            with suppress(Empty):
                goes_on = self._wakes.get(timeout=seconds)
            if goes_on and not self.left_s:
                self._interrupt()

    def end(self, thread: threading.Thread, seconds: float) -> None:
        """Ask, break the requests of a thread, and wait until it has ended, for 2 s at most.

        The thread works in `Deadline(stop=stop, budget=stop)`, and the stop allows 0 seconds. A
        thread that is left to itself may be stopped by Python's end in the middle of C++ code, such
        as torch's, which aborts the process. One that opens a connection cannot be interrupted.

        Args:
            thread: It may have ended; in a child that was forked since, it has.
            seconds: Longest wait, if it is shorter.
        """
        self.ask()
        self.begin()
        until = time.monotonic() + min(_END_S, seconds)
        while thread.is_alive() and thread is not threading.current_thread():
            self._interrupt()
            left = until - time.monotonic()
            if left <= 0:
                break
            thread.join(min(left, _LOOK_AGAIN_S))

    def _interrupt(self) -> None:
        for interrupt in list(self.interrupts):
            interrupt()

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """In this block SIGTERM and Ctrl-C ask for the end; a second one ends the process.

        Only the main thread can handle signals: in other threads this does nothing.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before: dict[int, Any] = {}

        def handle(number: int, _frame: FrameType | None) -> None:
            self.by_signal = self.by_signal or not self
            self.ask(signal.Signals(number).name)
            self.begin()
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
