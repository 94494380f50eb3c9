"""How a loop is asked to end: by its user, or by SIGTERM and Ctrl-C while it runs."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def leaving_on_signals() -> Iterator[None]:
    """In this block SIGTERM and Ctrl-C end the process, with status 0: it holds nothing yet.

    For what a process does before its loop listens to signals by itself. Main thread only.
    """
    numbers = (signal.SIGTERM, signal.SIGINT)
    # no exception: one that is raised while garbage is collected would be lost
    before = [signal.signal(number, lambda *_: os._exit(0)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


class StopRequest:
    """Becomes true when a loop is asked to end in good order."""

    def __init__(self) -> None:
        self._wake: Callable[[], None] | None = None
        self.why = ""

    def __bool__(self) -> bool:
        return bool(self.why)

    def ask(self, why: str) -> None:
        """Ask for the end; the first reason counts. A signal's handler may call it."""
        if not self.why:
            self.why = why or "it was asked to"
            if self._wake is not None:
                self._wake()

    @contextmanager
    def waking(self, wake: Callable[[], None]) -> Iterator[None]:
        """In this block, call `wake` when the end is asked for; it must not block."""
        self._wake = wake
        try:
            yield
        finally:
            self._wake = None

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Take SIGTERM and Ctrl-C as a request to end; a second one ends the process at once.

        Only the main thread can listen to signals: elsewhere nothing changes.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before: dict[int, Any] = {}

        def handle(number: int, _frame: FrameType | None) -> None:
            self.ask(signal.Signals(number).name)
            for other, handler in before.items():
                signal.signal(other, handler)

        for ours in (signal.SIGTERM, signal.SIGINT):
            before[ours] = signal.signal(ours, handle)
        try:
            yield
        finally:
            for number, handler in before.items():
                if signal.getsignal(number) is handle:
                    signal.signal(number, handler)
