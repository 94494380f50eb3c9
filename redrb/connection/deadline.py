"""`Deadline`: how long a block of a thread waits and uses Redis; all calls in it keep to it."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from contextlib import AbstractContextManager
from typing import Self

from redrb.connection.stop import Stop
from redrb.errors import ConfigError

GRACE_S = 2.0
"""Time that a server has to answer: it may pause, for a fork or a slow disk."""

EXIT_S = 3.0
"""How long the end of the process, or of a client, waits for Redis until all streams are closed."""

SLICE_S = 1.0
"""Longest block before a waiter looks again, in case the process that should wake it has died."""

SHORT_OUTAGE_S = 1.0
"""Outage of Redis that every request survives, however short its timeout: time to reconnect."""

PAGES_S = 0.5
"""Time by which a call exceeds its timeout, at most, where scripts do work before it in pages."""

LAST_REQUESTS_S = 0.2
"""Time before the end of a block when waits in it end, for the requests with which a wait ends."""

WARN_EVERY_S = 30.0
"""Interval of repeated warnings."""

_SHORTEST_S = 0.05
"""Timeout of a socket when the deadline has passed: enough for a server that answers at once."""

_log = logging.getLogger("redrb")


def checked_timeout(timeout: object) -> float | None:
    """Return seconds to wait, None to wait for ever; raises ConfigError for others."""
    if timeout is None:
        return None
    number = timeout if isinstance(timeout, int | float) else math.nan
    if isinstance(timeout, bool) or not number >= 0:
        raise ConfigError(f"timeout={timeout!r:.80}: give seconds, 0 to look once, or None.")
    return number


class Deadline:
    """How long a block of this thread waits and uses Redis; calls below it look it up by `here`.

    `with Deadline(timeout)` begins a public call. A block within another one ends no later than
    that, and inherits its stop. A deadline that was left may be entered again: it counts from its
    making. Only silence is cut short: a long reply that keeps arriving is read to its end.

    Attributes:
        wait_until: Time when waits end (monotonic); infinite: never.
        repeat_until: Time after which no request is repeated.
        end: Time when all work with Redis has ended.
        budget: Its seconds on Redis, once a signal has come or its `end` was called, bound the
            block; None: nothing does.
        counts: Whether time in the block is time on Redis.
        stop: Ends waits at once when it is asked; None: nothing does. A failed request is then not
            repeated, and a wait is over at its next look, within a second.
    """

    def __init__(
        self,
        timeout: float | None = None,
        *,
        at_most: float | None = None,
        repeat_s: float | None = None,
        stop: Stop | None = None,
        budget: Stop | None = None,
        blocks_s: float = 0.0,
        silence_s: float = math.inf,
    ) -> None:
        """Count from now.

        Args:
            timeout: Seconds to wait for batches, room and the like, and to repeat requests while
                Redis is away; None: no limit. A request has `SHORT_OUTAGE_S` at least, and the
                last one may end `GRACE_S` later.
            at_most: Seconds after which all work with Redis has ended.
            repeat_s: Seconds after which no request of the block is repeated.
            stop: Ends waits at once when it is asked; it takes the place of an outer one.
            budget: Its seconds on Redis, once a signal has come, are those of the block. A
                request that is under way when they are over is interrupted in the main thread; in
                another one `Stop.end` interrupts it.
            blocks_s: Seconds for which the server may let its reply wait, as asked: a connection
                that is silent for so long is not broken.
            silence_s: Seconds after which a silent connection is broken, `GRACE_S` at least: a
                block without an end is used by another one that has an end.

        Raises:
            ConfigError: `timeout` is no number >= 0.
        """
        now = self._began = self._warned = time.monotonic()
        self.wait_until = self.end = self.repeat_until = math.inf
        if timeout is not None:
            timeout = checked_timeout(timeout) or 0.0
            self.wait_until = now + timeout
            self.end = now + max(timeout, SHORT_OUTAGE_S) + GRACE_S
        if at_most is not None:
            self.end = min(self.end, now + at_most)
            self.wait_until = min(self.wait_until, self.end - LAST_REQUESTS_S)
        if repeat_s is not None:
            self.repeat_until = now + repeat_s
        self.stop = stop
        self.budget = budget
        self._blocks_s = blocks_s
        self.silence_s = silence_s
        self.counts = budget is None
        self._outer: Deadline | None = None
        self._watch: AbstractContextManager[None] | None = None
        self._refusals: Counter[tuple[object, ...]] | None = None

    def __enter__(self) -> Self:
        outer = self._outer = _here.deadline
        self.wait_until = min(self.wait_until, outer.wait_until)
        self.repeat_until = min(self.repeat_until, outer.repeat_until)
        self.end = min(self.end, outer.end)
        self.silence_s = min(self.silence_s, outer.silence_s)
        if self.stop is None:
            self.stop = outer.stop
        if self.budget is None or self.budget is outer.budget:
            self.budget = outer.budget
            self.counts = self.counts or outer.counts
            if self.budget is not None and self.counts and not outer.counts:
                self.budget.enter()
        elif threading.current_thread() is threading.main_thread():
            self._watch = self.budget.watched()
            self._watch.__enter__()
        _here.deadline = self
        return self

    def __exit__(self, *_: object) -> None:
        outer = _here.deadline = self._outer or _UNLIMITED
        if self._watch is not None:
            self._watch.__exit__(None, None, None)
            self._watch = None
        elif self.budget is not None and self.counts and not outer.counts:
            self.budget.leave()

    @property
    def waited_s(self) -> float:
        """Seconds since the block began."""
        return time.monotonic() - self._began

    @property
    def over(self) -> bool:
        """Whether the time to wait is up, or the thread was asked to stop."""
        return bool(self.stop) or self._wait_s(0.0) <= 0

    @property
    def pages_over(self) -> bool:
        """Whether the call must end although a script has more to do before it."""
        return bool(self.stop) or self._wait_s(PAGES_S) <= 0

    @property
    def passed(self) -> bool:
        """Whether the block should have ended."""
        return self.left_s == 0.0

    @property
    def left_s(self) -> float:
        """Seconds until all work with Redis must have ended, at least 0; perhaps infinite."""
        left = math.inf if self.budget is None else self.budget.left_s
        return left if self.end == math.inf else min(left, max(0.0, self.end - time.monotonic()))

    @property
    def repeats_s(self) -> float:
        """Seconds for which a request of now is repeated while Redis is away; perhaps infinite."""
        now = time.monotonic()
        return max(0.0, min(self.repeat_until - now, max(SHORT_OUTAGE_S, self.wait_until - now)))

    @property
    def waits_s(self) -> float:
        """Seconds that are left of all timeouts; perhaps infinite."""
        return max(0.0, self.wait_until - time.monotonic())

    def slice_s(self, longest_s: float | None = None) -> float:
        """Return the seconds to block before looking again, at least 0."""
        longest_s = SLICE_S if longest_s is None else longest_s
        return max(0.0, min(longest_s, self._wait_s(0.0)))

    def shortened(self, timeout: float | None) -> float | None:
        """Return a socket's timeout, cut to what is left.

        Where much is left a third of it is used, so that a connection that is frozen costs one
        attempt and not the whole call.
        """
        left = self.left_s
        if timeout is None or left == self.silence_s == math.inf:
            return timeout
        third = max(min(left / 3, self.silence_s), GRACE_S, self._blocks_s + GRACE_S)
        return min(timeout, max(left, _SHORTEST_S), third)

    def pause(self, seconds: float) -> None:
        """Wait between two attempts of a request, or until the thread is asked to stop."""
        seconds = min(seconds, self.left_s)
        if self.stop is None:
            time.sleep(seconds)  # noqa: TID251 (the pause of a retry, whose length is the point)
        else:
            self.stop.wait(seconds)

    @property
    def refusals(self) -> Counter[tuple[object, ...]]:
        """How often scripts have refused a request of this block, by reason."""
        if self._refusals is None:
            self._refusals = Counter()
        return self._refusals

    def log(self, missing: str, namespace: str = "") -> None:
        """Log the missing thing, once every `WARN_EVERY_S` seconds, and where others bring it."""
        now = time.monotonic()
        if now - self._warned >= WARN_EVERY_S:
            self._warned = now
            look = f"; `redrb doctor --namespace {namespace}` says why" if namespace else ""
            _log.warning("%s, for %.0f s now%s", missing, self.waited_s, look)

    def _wait_s(self, grace_s: float) -> float:
        """Return the seconds to wait, and `grace_s` more, until the last requests must be sent."""
        now = time.monotonic()
        left = min(self.wait_until + grace_s - now, self.end - LAST_REQUESTS_S - now)
        return left if self.budget is None else min(left, self.budget.left_s - LAST_REQUESTS_S)


_UNLIMITED = Deadline()
_UNLIMITED.counts = False


class _Here(threading.local):
    """The innermost deadline of a thread."""

    deadline = _UNLIMITED


_here = _Here()


def here() -> Deadline:
    """Return the innermost deadline of this thread; one without limits where no call began."""
    return _here.deadline
