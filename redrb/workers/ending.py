"""The end of a worker's process: its status."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
from typing import NoReturn

from redrb.errors import ConfigError, RedrbError, WeightMismatch

WATCHER = "redrb-run-watcher"
"""Name of the thread that waits for the end of `redrb run`; Python may stop it where it is."""

WRONG_CONFIGURATION = 2
"""Exit status of a worker that would fail in the same way if it were started again."""


def exit_status(error: RedrbError) -> int:
    """Return the exit status of a worker that an error ends: 2 if a restart would not help, else 1.

    A restart changes neither settings nor the shapes of published weights and of the model.
    """
    return WRONG_CONFIGURATION if isinstance(error, ConfigError | WeightMismatch) else 1


def end(status: int) -> NoReturn:
    """End this process with a status, at once if a thread still waits for Redis.

    Such a thread is a daemon, which Python stops wherever it is when the interpreter ends. In the
    middle of C++ code, such as torch's, this would abort the process. What the worker holds is
    closed by now, so nothing is lost without Python's own end.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it would change the status, and nothing else
    if any(thread.daemon and thread.name != WATCHER for thread in threading.enumerate()):
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    gc.freeze()  # spares the interpreter's last collection, which takes 0.4 s with torch
    sys.exit(status)
