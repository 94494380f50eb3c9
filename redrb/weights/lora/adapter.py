"""Checks of an adapter's A, B and settings, for publishers and for readers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from redrb.errors import ConfigError, EncodeError, WeightMismatch
from redrb.weights.lora.layers import lora_of
from redrb.weights.lora.names import layer_name, pairs
from redrb.weights.tensors.fitting import listed
from redrb.weights.wire.lora_config import LoraConfig


def adapter_of(model: Any) -> tuple[dict[str, Tensor], dict[str, LoraConfig]]:
    """Return the adapter to publish, after all checks that readers will make.

    Args:
        model: A model with LoRA layers, see `lora_of`; or a pair: tensors by name, as ColossalAI or
            PEFT names them, and settings by layer, as `LoraMerger.plan` takes them.

    Returns:
        The tensors under their given names, and settings by layer.
    """
    tensors, settings = lora_of(model) if isinstance(model, nn.Module) else _from_pair(model)
    if not tensors:
        raise ConfigError("there are no LoRA layers: a LoRA layer has lora_A and lora_B.")
    try:
        layers = layers_of(tensors, settings)
        configs = {
            layer: required_config(layer, config) for layer, (_, _, config) in layers.items()
        }
    except WeightMismatch as error:
        raise EncodeError(f"{error} Nothing was published.") from error
    more = [layer for layer in settings if layer_name(layer) not in layers]
    if more:
        raise EncodeError(
            f"there are settings of {listed(more)}, but no lora_A and lora_B of the same name; "
            f"layers with lora_A and lora_B are {listed(layers)}. Nothing was published."
        )
    return dict(tensors), {layer: configs[layer_name(layer)] for layer in settings}


def layers_of(
    state: Mapping[str, Tensor], configs: Mapping[str, Any]
) -> dict[str, tuple[Tensor, Tensor, LoraConfig | None]]:
    """Return A `[r, in]`, B `[out, r]` and the settings (or None) of each layer."""
    settings = {layer_name(layer): config for layer, config in configs.items()}
    found = {}
    for layer, (a, b) in pairs(state).items():
        given = settings.get(layer)
        try:
            config = None if given is None else LoraConfig.of(given)
        except ConfigError as error:
            raise WeightMismatch(f"LoRA of layer {layer!r}: {error}") from error
        if config is not None:
            check_rank(layer, a.shape[0], config.r)
        found[layer] = a, b, config
    return found


def required_config(layer: str, config: LoraConfig | None) -> LoraConfig:
    """Return the settings of a layer to merge, or raise WeightMismatch."""
    if config is None:
        raise WeightMismatch(f"LoRA of layer {layer!r} cannot be merged: it has no settings.")
    return config


def check_rank(layer: str, rank: int, wanted: object) -> None:
    """Check that A and B have the rank of the settings, or raise WeightMismatch."""
    if rank != wanted:
        raise WeightMismatch(
            f"LoRA of layer {layer!r} has rank {rank}, but its settings say r={wanted!r:.40}."
        )


def _from_pair(adapter: Any) -> tuple[Mapping[str, Tensor], Mapping[str, Any]]:
    is_pair = isinstance(adapter, tuple | list) and len(adapter) == 2
    if not is_pair or not all(isinstance(part, Mapping) for part in adapter):
        raise ConfigError(
            f"cannot publish the adapter of a {type(adapter).__name__}: give a model with LoRA "
            "layers, or a pair of tensors by name and a LoraConfig by layer: "
            '({"0.lora_A": a, "0.lora_B": b}, {"0": LoraConfig(...)}).'
        )
    tensors, settings = adapter
    for name in (*tensors, *settings):
        if not isinstance(name, str):
            raise ConfigError(
                f"{name!r:.80}: names of an adapter's tensors and layers are strings."
            )
    return tensors, settings
