"""How a worker is asked to end: SIGTERM and Ctrl-C let it finish what it holds."""

from __future__ import annotations

import signal
import threading
from types import FrameType


class Stop:
    """Becomes true when the process is asked to end; a second signal ends it at once."""

    def __init__(self) -> None:
        self._event = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)

    def __bool__(self) -> bool:
        return self._event.is_set()

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self._event.set()
        signal.signal(number, signal.SIG_DFL)
