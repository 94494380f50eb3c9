"""Signals to a run: the first one ends it in order, the second one at once."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupt:
    """The signal that asked the run to end.

    Attributes:
        number: Its number; 0: none came.
    """

    number: int = 0

    @property
    def name(self) -> str:
        """Its name, such as SIGINT."""
        return signal.Signals(self.number).name

    @property
    def status(self) -> int:
        """The exit status of a process that it ended, as shells count."""
        return 128 + self.number


@contextmanager
def interrupts(wake: Callable[[], None], at_once: Callable[[], None]) -> Iterator[Interrupt]:
    """In this block Ctrl-C, SIGTERM and SIGHUP are noted; main thread only.

    The first signal calls `wake`, which must not block; a second one calls `at_once`, and raises
    KeyboardInterrupt.
    """
    interrupt = Interrupt()
    before: dict[int, Any] = {}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def handle(number: int, _frame: FrameType | None) -> None:
        if interrupt.number:
            restore()
            at_once()
            raise KeyboardInterrupt
        interrupt.number = number
        wake()

    for number in _NUMBERS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as SIGHUP under nohup
            before[number] = signal.signal(number, handle)
    try:
        yield interrupt
    finally:
        restore()
