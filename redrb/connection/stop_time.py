"""The time that a thread may spend on Redis once its process was asked to end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue

_LOOK_AGAIN_S = 0.1
"""Shortest pause between two looks whether the time is up."""


class StopTime:
    """Counts the seconds that one thread spends on Redis after `begin`; at the end it interrupts.

    Time between requests does not count: a training step or a checkpoint that is under way when a
    signal comes is finished, and the requests after it have all of the time. A request that is
    under way when the time is up is interrupted by its entry in `interrupts`.
    """

    def __init__(self, seconds: float) -> None:
        """Begin with `seconds`; they do not count down before `begin`."""
        self._left = seconds
        self._begun_at: float | None = None
        self._entered_at: float | None = None
        self._wakes: SimpleQueue[bool] = SimpleQueue()
        self.interrupts: set[Callable[[], None]] = set()

    def begin(self) -> None:
        """Begin to count; a signal handler may call it, also a second time."""
        if self._begun_at is None:
            self._begun_at = time.monotonic()
            self._wakes.put(True)

    @property
    def left_s(self) -> float | None:
        """Seconds that are left; None before `begin`."""
        if self._begun_at is None:
            return None
        entered = self._entered_at
        used = 0.0 if entered is None else time.monotonic() - max(entered, self._begun_at)
        return max(0.0, self._left - used)

    @property
    def over(self) -> bool:
        """Whether the time is up."""
        return self.left_s == 0.0

    def enter(self) -> None:
        """Note that the thread begins to work with Redis."""
        self._entered_at = time.monotonic()

    def leave(self) -> None:
        """Note that it has ended this work."""
        left = self.left_s
        self._entered_at = None
        if left is not None:
            self._left = left

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
            if not self._wakes.get():
                return
        while self._sleep(max(self.left_s or 0.0, _LOOK_AGAIN_S)):
            if self.over:
                for interrupt in list(self.interrupts):
                    interrupt()

    def _sleep(self, seconds: float) -> bool:
        """Sleep; returns False when the block has ended."""
        try:
            return self._wakes.get(timeout=seconds)
        except Empty:
            return True
