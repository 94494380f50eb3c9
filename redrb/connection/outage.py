"""Logs failures that last without a line for each of them."""

from __future__ import annotations

import logging
import time
import weakref

FIRST_PAUSE_S = 30.0
"""Seconds between the first line of an outage and the second; each later pause is twice as long."""

LONGEST_PAUSE_S = 3600.0

_log = logging.getLogger("redrb")

_shared: dict[tuple[str, str], Outage] = {}


class Outage:
    """A failure that lasts: logged once, then at growing intervals, then its end.

    Several objects may share one. It has no lock, which a fork could copy while it is held: when
    two threads fail at the same moment, both may log it.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._began: float | None = None
        self._due = self._pause_s = 0.0
        self._failing: weakref.WeakSet[object] = weakref.WeakSet()

    @property
    def lasts(self) -> bool:
        """Whether it is not over."""
        return self._began is not None

    def failed(
        self, why: object, *, who: object = None, traceback: BaseException | None = None
    ) -> None:
        """Note a failure, and log it if it is the first or a line is due.

        Args:
            who: The object that fails; None: this outage has only one.
        """
        now = time.monotonic()
        if not self._failing:  # those that failed before are gone
            self._began = None
        self._failing.add(self if who is None else who)
        if self._began is None:
            self._began, self._pause_s = now, FIRST_PAUSE_S
            text = self._what
        elif now >= self._due:
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            text = f"{self._what}, for {now - self._began:.0f} s now"
        else:
            return
        self._due = now + self._pause_s
        _log.warning("%s: %s", text, str(why), exc_info=traceback)  # a record keeps no frames

    def leave(self, who: object) -> None:
        """Note that an object that fails does nothing more."""
        self._failing.discard(who)

    def over(self, *, who: object = None) -> None:
        """Note a success; logs the end if all that failed have succeeded since, or are gone."""
        self._failing.discard(self if who is None else who)
        began = self._began
        if began is None or len(self._failing):
            return
        self._began = None
        _log.warning("recovered after %.1f s: %s", time.monotonic() - began, self._what)


def shared_outage(what: str, key: str) -> Outage:
    """Return the outage of this process that all share who fail in the same way.

    Args:
        key: What distinguishes it from others with the same text, such as the place of a server.
    """
    return _shared.setdefault((what, key), Outage(what))
