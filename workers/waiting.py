"""How a worker waits: it looks every second whether it is to end, and endures outages of Redis."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from redrb.errors import BatchTimeout, StoreUnavailable, WeightTimeout

T = TypeVar("T")

SLICE_S = 1.0
"""Longest wait before a worker looks whether it is to end."""


def wait_in_slices(
    attempt: Callable[[float], T], ended: Callable[[], bool], *, timeout: float, retry_s: float
) -> T | None:
    """Call `attempt` until it returns something; None when the worker is to end before that.

    Args:
        attempt: Waits for so many seconds at most, then raises.
        ended: Whether the worker is to end.
        timeout: Seconds after which the last error is passed on, with the whole time in it.
        retry_s: Seconds for which Redis may be away; an attempt alone gives up with its slice.

    Raises:
        BatchTimeout, WeightTimeout: `attempt` found nothing in time.
        StoreUnavailable: Redis stayed away.
    """
    started = time.monotonic()
    reached = started
    while not ended():
        left_s = max(0.0, started + timeout - time.monotonic())
        try:
            return attempt(min(SLICE_S, left_s))
        except (BatchTimeout, WeightTimeout) as error:
            reached = time.monotonic()
            if reached - started >= timeout:
                raise _with_whole_time(error, reached - started) from None
        except StoreUnavailable:
            if time.monotonic() - reached >= retry_s:
                raise
    return None


def _with_whole_time(
    error: BatchTimeout | WeightTimeout, waited_s: float
) -> BatchTimeout | WeightTimeout:
    """Return the error of the last slice as that of the whole wait."""
    if isinstance(error, WeightTimeout):
        return WeightTimeout(
            name=error.name, newer_than=error.newer_than, newest=error.newest, waited_s=waited_s
        )
    return BatchTimeout(
        task=error.task,
        wanted=error.wanted,
        available=error.available,
        waited_s=waited_s,
        blocked=error.blocked,
    )
