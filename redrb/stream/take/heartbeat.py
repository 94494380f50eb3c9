"""Says, beside whatever the process does, that a consumer lives."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from queue import Empty, SimpleQueue

from redrb.errors import RedrbError, StoreClosed

_log = logging.getLogger("redrb")

_PATIENCE_S = 0.5


class Heartbeat:
    """Calls `beat` every `interval_s` seconds on a thread of its own, until it is stopped.

    It holds the method's owner weakly, and ends with it, or with the client.

    A beat that fails is logged and the next one tries again: the leases live until their deadline
    in Redis passes.
    """

    def __init__(self, beat: Callable[[], None], interval_s: float, name: str) -> None:
        self._beat = weakref.WeakMethod(beat)
        self._interval_s = interval_s
        # a queue and not an event: `nudge` is called from finalizers, at any point of this code
        self._nudges: SimpleQueue[bool] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"redrb-{name}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Beat no more; waits a little for a beat that is under way."""
        self._nudges.put(False)
        if threading.current_thread() is not self._thread:
            self._thread.join(_PATIENCE_S)

    def nudge(self) -> None:
        """Beat now; may be called from anywhere, also while garbage is collected."""
        self._nudges.put(True)

    def _run(self) -> None:
        while self._wait():
            beat = self._beat()
            if beat is None:
                return
            try:
                beat()
            except StoreClosed:
                return
            except RedrbError as error:
                _log.warning("heartbeat failed, leases may be taken over: %s", error)
            del beat  # it holds its owner

    def _wait(self) -> bool:
        """Wait for the next beat; returns False when there is to be none."""
        try:
            return self._nudges.get(timeout=self._interval_s)
        except Empty:
            return True
