"""The exact merge of LoRA into base weights, or its loading into a model's LoRA layers.

A publisher sends only `lora_A` and `lora_B` (Hu et al. 2021, arXiv:2106.09685) and the settings of
each layer. The merged weight is always `base + T(B @ A) * scale` with the newest A and B, where
`scale` is `alpha / r` and T transposes if `fan_in_fan_out`. The base is kept, so that nothing of
earlier updates stays in the weight.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from redrb.errors import EncodeError, WeightMismatch
from redrb.weights.lora.adapter import layers_of, required_config
from redrb.weights.lora.layers import LoraLayer, lora_layers
from redrb.weights.lora.names import layer_name
from redrb.weights.tensors.names import plain_name, unwrapped
from redrb.weights.tensors.state import synchronize
from redrb.weights.wire.lora_config import LoraConfig

_MERGEABLE = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


def merged(base: Tensor, a: Tensor, b: Tensor, config: LoraConfig) -> Tensor:
    """Return `base + T(B @ A) * scale` in the dtype and on the device of `base`.

    The computation is in float32 (float64 if `base` is), without autocast, and rounded once.

    Args:
        base: The weight without LoRA, `[out, in]`, or `[in, out]` if `fan_in_fan_out`.
        a: `[r, in]`.
        b: `[out, r]`.
    """
    compute = torch.float64 if base.dtype == torch.float64 else torch.float32
    with torch.no_grad(), torch.autocast(base.device.type, enabled=False):
        product = (b.to(base.device, compute) @ a.to(base.device, compute)) * config.scale
        product = product.T if config.fan_in_fan_out else product
        return (base.to(compute) + product).to(base.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class LayerUpdate:
    """The update of one layer: A and B are loaded, or merged into a weight.

    Attributes:
        into: The model's LoRA layer, or the name of the weight that A and B are merged into.
        config: Settings of the layer; None if A and B are loaded.
    """

    a: Tensor
    b: Tensor
    into: LoraLayer | str
    config: LoraConfig | None


class LoraMerger:
    """Loads LoRA into one model's LoRA layers, or merges it into weights without LoRA layers.

    The base of each merged weight is kept beside it.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = unwrapped(module)
        self._bases: dict[str, Tensor] = {}

    def forget(self, loaded: Container[str] | None = None) -> None:
        """Take the present weights as new bases, after they were loaded."""
        kept = self._bases.items() if loaded is not None else ()
        self._bases = {name: base for name, base in kept if name not in (loaded or ())}

    def plan(self, state: Mapping[str, Tensor], configs: Mapping[str, Any]) -> list[LayerUpdate]:
        """Return the updates of all layers, after checking all of them, or raise WeightMismatch.

        Args:
            state: `<layer>.lora_A` `[r, in]` and `<layer>.lora_B` `[out, r]`, as ColossalAI or PEFT
                names them.
            configs: Settings by layer: `LoraConfig`, or any object with its attributes.
        """
        layers = layers_of(state, configs)
        try:
            of_model = dict(lora_layers(self._module))
        except EncodeError as error:
            raise WeightMismatch(f"the model's LoRA layers cannot be updated: {error}") from error
        weights = _weights(self._module)
        changes: list[LayerUpdate] = []
        for layer, (a, b, config) in layers.items():
            if layer in of_model:
                _check_same(layer, of_model[layer], a, b, config)
                changes.append(LayerUpdate(a, b, of_model[layer], None))
            elif layer not in weights:
                raise WeightMismatch(
                    f"LoRA of layer {layer!r} cannot be merged: the model has no such layer."
                )
            else:
                config = required_config(layer, config)
                _check_fits(layer, weights[layer], a, b, config)
                changes.append(LayerUpdate(a, b, weights[layer].names[0], config))
        kept = of_model.keys() - layers.keys()
        if kept and len(kept) < len(of_model):
            raise WeightMismatch(
                f"the update lacks LoRA of layer {min(kept)!r}: the model would have parts of two "
                "adapters. Publish all layers, or give the model the same LoRA layers."
            )
        return changes

    def apply(self, planned: list[LayerUpdate]) -> None:
        """Apply planned updates; one weight at a time is in memory beside the model."""
        live = {plain_name(name): tensor for name, tensor in self._module.named_parameters()}
        merged_into = {change.into for change in planned if isinstance(change.into, str)}
        for name in self._bases.keys() - merged_into:  # layers that the newest adapter lacks
            _set(live[name], self._bases.pop(name))
        for change in planned:
            if isinstance(change.into, LoraLayer):
                _set(change.into.a, change.a)
                _set(change.into.b, change.b)
            elif change.config is not None:
                name = change.into
                if name not in self._bases:
                    self._bases[name] = live[name].detach().clone()
                _set(live[name], merged(self._bases[name], change.a, change.b, change.config))
        synchronize(live.values())


@dataclass(frozen=True, slots=True, eq=False)
class _Weight:
    tensor: Tensor
    names: list[str]  # one for each module that has the tensor


def _weights(module: nn.Module) -> dict[str, _Weight]:
    """Return the weight of each layer, by the layer's name in the model without LoRA.

    Weights have the names that `module_tensors` gives them.
    """
    names: dict[int, list[str]] = {}
    found: dict[str, _Weight] = {}
    for path, part in module.named_modules():
        for name, parameter in part.named_parameters(recurse=False):
            tied = names.setdefault(id(parameter), [])
            tied.append(plain_name(f"{path}.{name}" if path else name))
            if name == "weight":
                layer = layer_name(plain_name(path)).removesuffix(".base_layer")
                found[layer] = _Weight(parameter, tied)
    return found


def _check_fits(layer: str, weight: _Weight, a: Tensor, b: Tensor, config: LoraConfig) -> None:
    """Check that A and B can be merged into a weight that no other layer shares."""
    shape, dtype = list(weight.tensor.shape), weight.tensor.dtype
    made = [b.shape[0], a.shape[1]]
    made = made[::-1] if config.fan_in_fan_out else made
    if made != shape:
        raise WeightMismatch(
            f"the product of LoRA of layer {layer!r} is {made}, but the weight is {shape}."
        )
    if dtype not in _MERGEABLE or hasattr(weight.tensor, "quant_state"):
        raise WeightMismatch(
            f"LoRA of layer {layer!r} cannot be merged into {dtype}: load the model in a "
            "floating-point dtype, or give it LoRA layers."
        )
    if len(weight.names) > 1:
        raise WeightMismatch(
            f"LoRA of layer {layer!r} cannot be merged: {' and '.join(weight.names)} are one "
            "tensor. Untie them, or give the model LoRA layers."
        )


def _check_same(
    layer: str, present: LoraLayer, a: Tensor, b: Tensor, config: LoraConfig | None
) -> None:
    """Check that shapes and scale equal those of the model's layer, and that it is not merged."""
    shapes = [list(tensor.shape) for tensor in (a, b, present.a, present.b)]
    if shapes[:2] != shapes[2:]:
        raise WeightMismatch(
            f"LoRA of layer {layer!r} is {shapes[0]} and {shapes[1]}, the model's {shapes[2]} and "
            f"{shapes[3]}. Nothing was loaded."
        )
    if config is not None and not math.isclose(config.scale, present.config.scale):
        raise WeightMismatch(
            f"LoRA of layer {layer!r} has the scale {config.scale:g}, the model's layer "
            f"{present.config.scale:g}: create it with the same lora_alpha and use_rslora."
        )
    if present.merged:
        raise WeightMismatch(
            f"LoRA of layer {layer!r}: the model's layer is merged, so that new A and B would have "
            "no effect. Unmerge it first."
        )


def _set(target: Tensor, value: Tensor) -> None:
    with torch.inference_mode(target.is_inference()), torch.no_grad():
        target.copy_(value)
