"""`Wait`: how long a put or take waits and is retried (at most the client's limit), and logs."""

from __future__ import annotations

import logging
import time
from collections import Counter
from contextlib import AbstractContextManager, nullcontext

from redrb.checks import checked_timeout
from redrb.connection import deadline, stopping
from redrb.connection.deadline import GRACE_S, within
from redrb.errors import StoreError

SLICE_S = 1.0
"""Longest block before a waiter looks again, in case the process that should wake it has died."""

QUEUE_TTL_MS = 3000
"""Time for which a waiter that stopped looking keeps its place in the queue."""

SHORT_OUTAGE_S = 1.0
"""Outage of Redis that every request survives, however short its timeout: time to reconnect."""

PAGES_S = 0.5
"""Time by which a call exceeds its timeout, at most, where scripts do work before it in pages."""

LAST_REQUESTS_S = 0.2
"""Time before another deadline ends a wait, for the requests with which the wait ends."""

MOST_REFUSALS = 3
"""Refusals for the same reason, in one call, after which the task's keys count as damaged."""

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
        self._refusals: Counter[tuple[object, ...]] = Counter()

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
        """Whether the time is up, or this thread was asked to stop, or may not use Redis longer."""
        return self.over_by(0.0)

    @property
    def pages_over(self) -> bool:
        """Whether the call must end although a script has more to do before it."""
        return self.over_by(PAGES_S)

    def over_by(self, grace_s: float) -> bool:
        """Return whether the wait is over: asked to stop, or for `grace_s` past its timeout."""
        if stopping.asked() or deadline.most_s(LAST_REQUESTS_S) < LAST_REQUESTS_S:
            return True
        return self._timeout is not None and self.waited_s >= self._timeout + grace_s

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
        left_s = self.left_s
        return self.most_s(longest_s if left_s is None else min(longest_s, left_s))

    @staticmethod
    def most_s(seconds: float) -> float:
        """Return `seconds`, or the time until another deadline ends the wait if that is less."""
        return max(0.0, deadline.most_s(seconds + LAST_REQUESTS_S) - LAST_REQUESTS_S)

    def refused(self, task: str, *state: object) -> None:
        """Note that a script has refused a request, which is sent again in the state read since.

        Args:
            task: Name of the task.
            state: The state: revision of the settings, epoch, and the like.

        Raises:
            StoreError: It was refused several times in this state, or after the time was up.
        """
        reason = (task,) if self.pages_over else (task, *state)
        self._refusals[reason] += 1
        if self._refusals[reason] > MOST_REFUSALS:
            raise StoreError(
                f"task {task!r}: its scripts refuse the settings that Redis has just returned, so "
                "its keys are damaged, or other processes change its settings all the time. A "
                "change of any setting (`redrb set`) writes the rules anew that the scripts read."
            )

    def log(self, missing: str) -> None:
        """Log the missing thing, once every `WARN_EVERY_S` seconds."""
        now = time.monotonic()
        if now - self._warned >= WARN_EVERY_S:
            self._warned = now
            _log.warning("%s, for %.0f s now", missing, self.waited_s)
