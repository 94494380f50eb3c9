"""Small questions about models, and the environment that torch.distributed reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from redrb import environment
from redrb.errors import ConfigError

_ENVIRONMENT = ("local_rank", "rank", "world_size", "master_port", "master_addr")


def set_environment(values: Mapping[str, Any] | None) -> None:
    """Set the variables of torch.distributed.

    Args:
        values: `local_rank`, `rank`, `world_size`, `master_port`, `master_addr`; any of them.

    Raises:
        ConfigError: There is another name.
    """
    unknown = set(values or ()) - set(_ENVIRONMENT)
    if unknown:
        raise ConfigError(f"env_info has {sorted(unknown)}; it may have {list(_ENVIRONMENT)}.")
    for name, value in (values or {}).items():
        environment.set_variable(name.upper(), str(value))


def parameters_of(model: object) -> int:
    """Return the number of parameters of a model; 0 where it is none."""
    return sum(p.numel() for p in model.parameters()) if isinstance(model, nn.Module) else 0
