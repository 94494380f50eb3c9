"""Which `transfer_queue` this process has, and what redrb's has not.

That can be imported, and says so at the call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NoReturn

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


def absent(name: str) -> Callable[..., NoReturn]:
    """Return a function that says at the call that redrb has no such thing."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise ConfigError(
            f"redrb has no transfer_queue.{name}. It has the functions kv_*, init, close, "
            "get_client with the methods that verl calls, save_checkpoint and load_checkpoint: "
            "docs/how-to/verl.md. With REDRB_TRANSFER_QUEUE unset the process uses TransferQueue "
            "itself."
        )

    return refuse


def absent_class(name: str) -> type:
    """Return a class that can be imported and derived from, and whose objects cannot be made."""
    return type(name, (), {"__init__": absent(name), "__doc__": f"redrb has no {name}."})


StreamingDataset = absent_class("StreamingDataset")
StreamingDataLoader = absent_class("StreamingDataLoader")
BaseSampler = absent_class("BaseSampler")
SequentialSampler = absent_class("SequentialSampler")
GRPOGroupNSampler = absent_class("GRPOGroupNSampler")
RankAwareSampler = absent_class("RankAwareSampler")
SeqlenBalancedSampler = absent_class("SeqlenBalancedSampler")
