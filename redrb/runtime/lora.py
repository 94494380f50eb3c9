"""LoRA between trainers and makers: what travels, and how it becomes part of the base weights.

Only `lora_A` and `lora_B` travel (Hu et al. 2021, arXiv:2106.09685), with the settings of each
layer. A maker's weight is always `base + T(B @ A) * alpha / r` with the newest A and B, where T
transposes if `fan_in_fan_out`: the product of the update before is not in it any more.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from redrb.errors import DecodeError, WeightMismatch

# coati: <layer>.lora_A; PEFT: base_model.model.<layer>.lora_A[.adapter][.weight]
_NAME = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.\w+)?(?:\.weight)?")
_BASE = (".weight", ".base_layer.weight")


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Settings of one layer; names as in ColossalAI's `coati.models.lora`.

    Attributes:
        r: Rank.
        lora_alpha: Scale: the product counts `lora_alpha / r`.
        lora_dropout: Of training; a merged weight has none.
        fan_in_fan_out: The layer's weight is stored transposed, `[in, out]`.
    """

    r: int
    lora_alpha: float
    lora_dropout: float = 0.0
    fan_in_fan_out: bool = False


def lora_of(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, LoraConfig]]:
    """Return A and B of each LoRA layer, as `<layer>.lora_A`, and each layer's settings.

    A LoRA layer has `lora_A` and `lora_B`, as parameters (ColossalAI) or by adapter (PEFT, of
    which the active adapter counts).
    """
    tensors: dict[str, Tensor] = {}
    configs: dict[str, LoraConfig] = {}
    for name, layer in module.named_modules():
        a, b = _matrix(layer, "lora_A"), _matrix(layer, "lora_B")
        if a is None or b is None:
            continue
        tensors[f"{name}.lora_A"], tensors[f"{name}.lora_B"] = a, b
        configs[name] = LoraConfig(
            r=a.shape[0],
            lora_alpha=float(_of_adapter(layer, "lora_alpha", a.shape[0])),
            lora_dropout=_rate(_of_adapter(layer, "lora_dropout", 0.0)),
            fan_in_fan_out=bool(getattr(layer, "fan_in_fan_out", False)),
        )
    return tensors, configs


def encode_configs(configs: Mapping[str, Mapping[str, LoraConfig]]) -> str:
    """Return the settings of several models' layers as JSON."""
    return json.dumps(
        {
            model: {layer: asdict(config) for layer, config in layers.items()}
            for model, layers in configs.items()
        }
    )


def decode_configs(text: str) -> dict[str, dict[str, LoraConfig]]:
    """Return the settings of several models' layers.

    Raises:
        DecodeError: The text is not what `encode_configs` writes.
    """
    try:
        return {
            model: {layer: LoraConfig(**config) for layer, config in layers.items()}
            for model, layers in (json.loads(text) if text else {}).items()
        }
    except (ValueError, TypeError, AttributeError) as error:
        raise DecodeError(f"settings of LoRA layers are damaged: {error}") from error


class LoraMerger:
    """Merges LoRA into the weights of one model that has no LoRA layers of its own."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._bases: dict[str, Tensor] = {}

    def forget(self) -> None:
        """Take the weights as they are as the base: a full update has just loaded them."""
        self._bases.clear()

    def plan(
        self, state: Mapping[str, Tensor], configs: Mapping[str, Any]
    ) -> list[tuple[str, Tensor]]:
        """Return each layer's weight as it will be: its base plus the product of its A and B.

        Args:
            state: `<layer>.lora_A` `[r, in]` and `<layer>.lora_B` `[out, r]`.
            configs: Settings by layer: `LoraConfig`, or anything with its attributes.

        Raises:
            WeightMismatch: A layer, its other half or its settings are missing, or shapes differ.
        """
        live = dict(self._module.named_parameters())
        merged: list[tuple[str, Tensor]] = []
        for layer, (a, b) in _pairs(state):
            name = next((layer + end for end in _BASE if layer + end in live), None)
            config = configs.get(layer)
            if name is None or config is None:
                missing = "the model has no such layer" if name is None else "it has no settings"
                raise WeightMismatch(f"LoRA of layer {layer!r} cannot be merged: {missing}.")
            base = self._bases.get(name, live[name].detach())
            product = (b.float() @ a.float()) * (config.lora_alpha / config.r)
            product = product.T if config.fan_in_fan_out else product
            if product.shape != base.shape:
                raise WeightMismatch(
                    f"LoRA of layer {layer!r} makes {list(product.shape)}, its weight is "
                    f"{list(base.shape)}."
                )
            merged.append((name, base.float() + product.to(base.device)))
        return merged

    @torch.no_grad()
    def apply(self, planned: list[tuple[str, Tensor]]) -> None:
        """Set the weights that were planned."""
        live = dict(self._module.named_parameters())
        for name, weight in planned:
            if name not in self._bases:
                self._bases[name] = live[name].detach().clone()
            live[name].copy_(weight)


def _pairs(state: Mapping[str, Tensor]) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    halves: dict[str, dict[str, Tensor]] = {}
    for name, tensor in state.items():
        found = _NAME.fullmatch(name)
        if found is None:
            raise WeightMismatch(f"{name!r} is not a LoRA tensor: only lora_A and lora_B travel.")
        halves.setdefault(found[1], {})[found[2]] = tensor
    for layer, half in halves.items():
        if half.keys() != {"A", "B"}:
            raise WeightMismatch(f"LoRA of layer {layer!r} has only lora_{next(iter(half))}.")
        yield layer, (half["A"], half["B"])


def _matrix(layer: nn.Module, name: str) -> Tensor | None:
    found = getattr(layer, name, None)
    if isinstance(found, nn.ModuleDict):
        found = getattr(found[_adapter(layer)], "weight", None) if len(found) else None
    return found if isinstance(found, Tensor) else None


def _adapter(layer: nn.Module) -> str:
    active: Any = getattr(layer, "active_adapters", None) or ["default"]
    return str(active[0])


def _of_adapter(layer: nn.Module, name: str, default: float) -> Any:
    found: Any = getattr(layer, name, default)
    if not isinstance(found, dict | nn.ModuleDict):
        return found
    adapter = _adapter(layer)
    return found[adapter] if adapter in found else default  # noqa: SIM401 (ModuleDict has no get)


def _rate(dropout: Any) -> float:
    if isinstance(dropout, nn.Module):
        return float(getattr(dropout, "p", 0.0))
    return float(dropout or 0.0)
