"""`Steps`: since when a worker is in a step, and how long its steps last, for those who look."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_SHARE = 0.98
"""Share of the longest step that is left after another one: 34 steps halve it."""


class Steps:
    """The steps of one worker: each lasts from its batch to the request for the next one.

    Any thread may note a step; with several that train at once, the newest step counts.

    Attributes:
        limit_s: Seconds after which a step hangs; 0: as its steps before show.
        usual_s: Longest step of late: after each further step it counts less; 0 before the first.
        ended: Steps that have ended.
        total_s: Seconds that they lasted.
    """

    def __init__(self, limit_s: float = 0.0) -> None:
        self.limit_s, self.usual_s = limit_s, 0.0
        self.ended, self.total_s = 0, 0.0
        self._thread = threading.local()
        self._began: float | None = None

    @property
    def lasted_s(self) -> float:
        """Seconds since the step began; 0 between two steps."""
        began = self._began
        return 0.0 if began is None else time.monotonic() - began

    def begin(self) -> None:
        """Note that a step begins."""
        self._began = time.monotonic()

    def end(self) -> None:
        """Note that the step has ended, if one had begun."""
        if self._began is not None:
            lasted_s, self._began = self.lasted_s, None
            self.usual_s = max(lasted_s, _SHARE * self.usual_s)
            self.ended, self.total_s = self.ended + 1, self.total_s + lasted_s

    @contextmanager
    def fetching(self) -> Iterator[None]:
        """Note in this block, which takes a batch in any number of takes, that no step runs."""
        if getattr(self._thread, "is_ahead", False):
            yield
            return
        self.end()
        with self.ahead():
            yield
        self.begin()

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """Note no takes of this thread in this block; the caller notes the batch itself."""
        self._thread.is_ahead = True
        try:
            yield
        finally:
            self._thread.is_ahead = False
