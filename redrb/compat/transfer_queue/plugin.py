"""The entry point `verl.plugins`: verl imports this module in each of its processes.

It acts only with REDRB_TRANSFER_QUEUE=1. verl logs a plugin that fails to load at DEBUG and goes on
without it; here the process ends, as the run would wait for ever for rows that go elsewhere.
"""

from __future__ import annotations

import logging

from redrb import environment
from redrb.compat.transfer_queue.process import SWITCH
from redrb.errors import ConfigError, RedrbError


def load() -> None:
    """Install redrb if REDRB_TRANSFER_QUEUE is 1; end the process if that fails."""
    wanted = environment.variable(SWITCH, "0")
    try:
        if wanted not in ("0", "1"):
            raise ConfigError(f"{SWITCH} is {wanted!r:.80}: set 1, or 0 for TransferQueue itself.")
        if wanted == "1":
            from redrb.compat.transfer_queue import install

            install()
    except (ImportError, RedrbError) as error:
        message = f"redrb cannot take the place of transfer_queue: {error}"
        logging.getLogger("redrb").critical(message)
        raise SystemExit(message) from error


load()
