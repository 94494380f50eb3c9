"""How a loop is asked to end: by a call of `stop`, or by SIGTERM and Ctrl-C while it runs."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from redrb.connection.stopping import Stop


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
        waits: Ends the waits of a thread that works in `stoppable(request.waits)`.
    """

    def __init__(self) -> None:
        self.reason = ""
        self.waits = Stop()
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
            self.ask(signal.Signals(number).name)
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
