"""Models of a trainer or maker: made by the user's function, counted, placed by a strategy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from redrb.runtime.strategy import Strategy
from redrb.runtime.world import set_environment


@dataclass(frozen=True, slots=True)
class PlacedModels:
    """Models in the order in which `model_fn` returned them.

    Attributes:
        models: The models, placed by the strategy; None where there is no model.
        parameters: Number of parameters of each model; 0 if it is no module.
        strategy: The strategy that placed them.
    """

    models: tuple[Any, ...]
    parameters: tuple[int, ...]
    strategy: Strategy


def place_models(
    strategy_fn: Callable[[], Strategy | None],
    model_fn: Callable[[], Any],
    env_info: Mapping[str, Any] | None,
    *,
    device: str | torch.device | None = None,
) -> PlacedModels:
    """Make models and place them.

    Args:
        strategy_fn: Returns the strategy; None: `Strategy(device)`.
        model_fn: Returns a module, or several models; a model may be None or a function.
        env_info: As for `set_environment`, which is called first.
        device: Device of the default strategy.

    Raises:
        ConfigError: `env_info` has an unknown name, or a model cannot be placed.
    """
    set_environment(env_info)
    strategy = strategy_fn() or Strategy(device)
    with strategy.model_init_context():
        made = model_fn()
    models = (made,) if isinstance(made, nn.Module) else tuple(made)
    return PlacedModels(
        tuple(map(strategy.prepare, models)), tuple(map(_parameters_of, models)), strategy
    )


def _parameters_of(model: object) -> int:
    return sum(p.numel() for p in model.parameters()) if isinstance(model, nn.Module) else 0
