"""Between a thread that fetches and one that swaps: a swap that came too early gets its turn."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from redrb.connection.stopping import Stop

_OWED_S = 60.0
"""How long something waits for the swap that missed it, before what is newer is fetched."""


class Handover:
    """Keeps what was fetched for a swap that found nothing, since it was just on its way.

    Otherwise one that fetches all the time, since versions come faster than it can, would never
    have anything ready when a swap comes.
    """

    def __init__(self) -> None:
        self._taken = threading.Event()
        self._missed = False

    def missed(self) -> None:
        """Note that a swap came while something was on its way."""
        self._missed = True

    def taken(self) -> None:
        """Note that something was swapped in, or that nobody will do so any more."""
        self._taken.set()

    def give_way(self, is_ready: Callable[[], bool], stop: Stop) -> None:
        """Wait until what is ready is taken, if a swap has missed it."""
        if not self._missed:
            return
        self._missed = False
        deadline = time.monotonic() + _OWED_S
        while not stop.asked and (left := deadline - time.monotonic()) > 0:
            self._taken.clear()
            if stop.asked or not is_ready():
                break
            self._taken.wait(left)
