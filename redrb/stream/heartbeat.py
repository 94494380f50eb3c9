"""Renews leases from a thread; without it `lua/include/leases.lua` requeues them for others."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TypeVar

from redrb.connection.deadline import Deadline, here
from redrb.connection.outage import Outage, shared_outage
from redrb.errors import RedrbError, StoreClosed, StoreError

T = TypeVar("T")

BEATS_PER_DEADLINE = 3
"""Two beats in a row may be lost or late before the deadline passes."""

LONGEST_PERIOD_S = 2.5
"""Most seconds between two beats, so that people who look soon see that a process is silent."""

_SHORTEST_BEAT_S = 1.0
"""Time that a beat has at least, however short the lease."""

_GAPS = 64
"""Silences that are remembered, each longer than all after it."""

_STOP_S = 0.5
"""How long `stop` waits for a beat that is under way."""


def period_s(deadline_ms: int) -> float:
    """Return the seconds between two beats that renew a deadline."""
    return min(deadline_ms / 1000 / BEATS_PER_DEADLINE, LONGEST_PERIOD_S)


def do_each(left: deque[T], do: Callable[[T], None]) -> None:
    """Do what is left to a heartbeat, in its order; an entry that the store refuses stays."""
    while left:
        entry = left.popleft()
        try:
            do(entry)
        except StoreError:
            left.appendleft(entry)
            raise


class Silences:
    """How long Redis heard nothing of a heartbeat: the times between two beats that it answered.

    Safe among threads. A call that holds Python's lock (GIL) stops all threads, and with them the
    heartbeat: afterwards this says for how long.
    """

    def __init__(self) -> None:
        """Begin to listen."""
        self._heard = time.monotonic()
        self._gaps: deque[tuple[float, float]] = deque(maxlen=_GAPS)

    def end(self) -> float:
        """Note that Redis has answered a beat; returns the seconds of the silence before it."""
        before, self._heard = self._heard, time.monotonic()
        while self._gaps and self._gaps[-1][1] - self._gaps[-1][0] <= self._heard - before:
            self._gaps.pop()  # a shorter one that has ended before is never the longest
        self._gaps.append((before, self._heard))
        return self._heard - before

    def longest_s(self, since: float) -> float:
        """Return the seconds of the longest silence since a time (monotonic), until now."""
        gaps = [*self._gaps, (self._heard, time.monotonic())]
        return max((end - max(begin, since) for begin, end in gaps if end > since), default=0.0)


class Heartbeat:
    """Calls `beat` on a background thread, several times a deadline, until it is stopped.

    It holds the method's object weakly, and ends with it, or with the client. After a beat that
    fails the next one tries again, on another connection: leases live until their deadline in
    Redis passes. Heartbeats that fail in the same way are logged together, see `Outage`. A beat may
    take a sixth of the deadline, so that a connection that is frozen costs a few beats and not the
    lease.
    """

    def __init__(
        self,
        beat: Callable[[], None],
        deadline_ms: int,
        name: str,
        at_end: Callable[[], None] | None = None,
    ) -> None:
        """Start to beat.

        Args:
            deadline_ms: Time by which one beat moves the deadline.
            at_end: Called when the method's object is gone without `stop`.
        """
        self._beat = weakref.WeakMethod(beat)
        self._at_end = at_end
        self._interval_s = period_s(deadline_ms)
        self._longest_s = max(deadline_ms / 1000 / BEATS_PER_DEADLINE / 2, _SHORTEST_BEAT_S)
        self._outages: set[Outage] = set()
        # a queue and not an event: `nudge` is called from finalizers, at any point of this code
        self._nudges: SimpleQueue[bool] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"redrb-{name}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Beat no more; waits a little for a beat that is under way."""
        self._nudges.put(False)
        if threading.current_thread() is not self._thread:
            self._thread.join(min(_STOP_S, here().left_s))

    def nudge(self) -> None:
        """Beat now; may be called from anywhere, also while garbage is collected."""
        self._nudges.put(True)

    def _run(self) -> None:
        try:
            due = time.monotonic() + self._interval_s
            while self._wait(due):
                due = time.monotonic() + self._interval_s
                beat = self._beat()
                over = beat is None
                if over:
                    beat = self._at_end
                try:
                    with Deadline(at_most=self._longest_s):
                        if beat is not None:
                            beat()
                except StoreClosed:
                    return
                except RedrbError as error:
                    self._failed(error, f"{type(error).__name__} {getattr(error, 'where', '')}")
                except Exception as error:  # noqa: BLE001 (it must not end later beats)
                    self._failed(error, type(error).__name__, error)
                else:
                    while self._outages:
                        self._outages.pop().over(who=self)
                del beat  # it references its object
                if over:
                    return
        finally:
            for outage in self._outages:
                outage.leave(self)

    def _failed(self, why: object, key: str, traceback: Exception | None = None) -> None:
        what = "a heartbeat failed; leases last for lease_ms after the one before"
        outage = shared_outage(what, key)
        self._outages.add(outage)
        outage.failed(why, who=self, traceback=traceback)

    def _wait(self, due: float) -> bool:
        """Wait until the next beat is due; False when the heartbeat was stopped."""
        try:
            return self._nudges.get(timeout=max(0.0, due - time.monotonic()))
        except Empty:
            return True
