"""`sigterm_after`: a SIGTERM to this process, sent only once something here handles it."""

from __future__ import annotations

import os
import signal
import threading
import time

_HANDLED_S = 20


def sigterm_after(seconds: float) -> threading.Thread:
    """Send SIGTERM to this process, some seconds after a handler is there; returns the thread.

    Without a handler it would end the process that runs the tests, so that nothing is sent then.
    """
    before = signal.getsignal(signal.SIGTERM)

    def send() -> None:
        deadline = time.monotonic() + _HANDLED_S
        while signal.getsignal(signal.SIGTERM) == before:
            assert time.monotonic() < deadline, "nothing handles SIGTERM"
            time.sleep(0.005)
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=send)
    thread.start()
    return thread
