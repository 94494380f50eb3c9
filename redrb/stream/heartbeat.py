"""Says, beside whatever the process does, that a consumer lives."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable

from redrb.errors import RedrbError

_log = logging.getLogger("redrb")


class Heartbeat:
    """Calls `beat` every `interval_s` seconds on a thread of its own, until it is stopped.

    It holds the method's owner weakly, and ends with it.

    A beat that fails is logged and the next one tries again: the leases live until their deadline
    in Redis passes.
    """

    def __init__(self, beat: Callable[[], None], interval_s: float, name: str) -> None:
        self._beat = weakref.WeakMethod(beat)
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"redrb-{name}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Beat no more; returns at once."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_s):
            beat = self._beat()
            if beat is None:
                return
            try:
                beat()
            except RedrbError as error:
                _log.warning("heartbeat failed, leases may be taken over: %s", error)
            del beat  # it holds its owner
