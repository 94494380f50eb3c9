"""Which `transfer_queue` this process has."""

from __future__ import annotations

import sys

from redrb.errors import ConfigError

NAME = "transfer_queue"
SWITCH = "REDRB_TRANSFER_QUEUE"
LATER = "REDRB_TRANSFER_QUEUE_LATER"
"""Variable: what becomes of rows that were put after a checkpoint that is loaded: keep, drop."""

MARK = "redrb_takes_its_place"
"""Attribute of the module that redrb puts in the place of `transfer_queue`."""


def is_installed() -> bool:
    """Return whether `import transfer_queue` gives redrb's."""
    return hasattr(sys.modules.get(NAME), MARK)


def check_process() -> None:
    """Refuse to go on in a process that does not use redrb, though the driver of its run does.

    Raises:
        ConfigError: `transfer_queue` is another package's here, or verl was loaded without redrb.
    """
    if not is_installed() and (NAME in sys.modules or "verl" in sys.modules):
        raise ConfigError(
            "this run keeps its rows in redrb, but this process does not: its transfer_queue is "
            f"not redrb's. Set {SWITCH}=1 and REDRB_URL in the environment of every process, "
            "before `ray start` on each machine (or in ray_kwargs.ray_init.runtime_env.env_vars), "
            "and let VERL_USE_EXTERNAL_PLUGINS unset."
        )
