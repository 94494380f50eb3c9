"""What transfer_queue has and redrb does not: it can be imported, and says so at the call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from redrb.errors import ConfigError


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
