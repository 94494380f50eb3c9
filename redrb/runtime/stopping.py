"""How long a process works with Redis after a signal, and the end of one that has no work yet."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from redrb.checks import checked_number
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
