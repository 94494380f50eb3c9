"""`Wait`: how long a put or take waits and is retried (at most the client's limit), and logs."""

from __future__ import annotations

import logging
import time
from contextlib import AbstractContextManager, nullcontext

from redrb.checks import checked_timeout
from redrb.connection import stopping
from redrb.connection.deadline import GRACE_S, within

SLICE_S = 1.0
"""Longest block before a waiter looks again, in case the process that should wake it has died."""

QUEUE_TTL_MS = 3000
"""Time for which a waiter that stopped looking keeps its place in the queue."""

SHORT_OUTAGE_S = 1.0
"""Outage of Redis that every request survives, however short its timeout: time to reconnect."""

WARN_EVERY_S = 30.0
"""Interval of repeated warnings."""

_log = logging.getLogger("redrb")


_NO_DEADLINE = nullcontext()


class Wait:
    """One wait: its deadline, and a log line every half minute that names the missing thing."""

    def __init__(self, timeout: float | None) -> None:
        """Start waiting, for `timeout` seconds; None waits for ever."""
        self._started = time.monotonic()
        self._timeout = checked_timeout(timeout)
        self._warned = self._started

    @property
    def waited_s(self) -> float:
        """Seconds since the wait began."""
        return time.monotonic() - self._started

    @property
    def left_s(self) -> float | None:
        """Seconds until the wait ends; None if it never does."""
        return None if self._timeout is None else max(0.0, self._timeout - self.waited_s)

    @property
    def over(self) -> bool:
        """Whether the time is up, or this thread was asked to stop."""
        if stopping.asked():
            return True
        return self._timeout is not None and self.waited_s >= self._timeout

    @property
    def retry_s(self) -> float | None:
        """Seconds for which Redis may be away; None: the limit of the client."""
        if self._timeout is None:
            return None
        return max(SHORT_OUTAGE_S, self._timeout - self.waited_s)

    def deadline(self) -> AbstractContextManager[None]:
        """Let all requests of a block end with the wait, or at most `GRACE_S` later."""
        retry_s = self.retry_s
        return _NO_DEADLINE if retry_s is None else within(retry_s + GRACE_S)

    def slice_s(self, longest_s: float = SLICE_S) -> float:
        """Return the seconds to block before looking again."""
        if self._timeout is None:
            return longest_s
        return max(0.0, min(longest_s, self._timeout - self.waited_s))

    def log(self, missing: str) -> None:
        """Log the missing thing, once every `WARN_EVERY_S` seconds."""
        now = time.monotonic()
        if now - self._warned >= WARN_EVERY_S:
            self._warned = now
            _log.warning("%s, for %.0f s now", missing, self.waited_s)
