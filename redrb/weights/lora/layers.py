"""A model's LoRA layers, ColossalAI's or PEFT's: found, read, refused if they are more than LoRA.

Neither library is imported: layers are recognized by their attributes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from torch import Tensor, nn

from redrb.errors import ConfigError, EncodeError
from redrb.weights.lora.names import layer_name, lora_name
from redrb.weights.tensors.names import inside, plain_name, unwrapped
from redrb.weights.wire.lora_config import LoraConfig


@dataclass(frozen=True, slots=True, eq=False)
class LoraLayer:
    """A LoRA layer.

    Attributes:
        a: `lora_A`, `[r, in]`; the live one if the layer is a model's.
        b: `lora_B`, `[out, r]`, likewise.
        merged: Whether the weight of a model's layer includes the product at present.
    """

    a: Tensor
    b: Tensor
    config: LoraConfig
    merged: bool = False


def lora_of(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, LoraConfig]]:
    """Return the live A and B of each LoRA layer, as `<layer>.lora_A`, and each layer's settings.

    A LoRA layer has `lora_A` and `lora_B`, as parameters (ColossalAI) or by adapter (PEFT, whose
    active adapter counts). `<layer>` is its name in the model without LoRA and without wrappers
    such as `torch.compile`. ColossalAI's embeddings are returned as `fan_in_fan_out`.

    Initializations that change the base weights (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) are allowed;
    publish the base weights too.
    """
    tensors: dict[str, Tensor] = {}
    configs: dict[str, LoraConfig] = {}
    for name, found in lora_layers(module):
        tensors[lora_name(name, "A")], tensors[lora_name(name, "B")] = found.a, found.b
        configs[name] = found.config
    return tensors, configs


def lora_layers(module: nn.Module) -> Iterator[tuple[str, LoraLayer]]:
    """Yield each LoRA layer with its name in the model without LoRA, or raise EncodeError."""
    for path, layer in unwrapped(module).named_modules():
        if inside(layer) is not None:  # a wrapper seems to have the attributes of the layer inside
            continue
        name = layer_name(plain_name(path))
        _check_beside(name, layer)
        found = _read(name, layer)
        if found is not None:
            yield name, found


def _read(name: str, layer: nn.Module) -> LoraLayer | None:
    if isinstance(getattr(layer, "lora_A", None), nn.ModuleDict):
        adapter = _active(name, layer)
        if adapter is None:
            return None
        _check_adapter(name, layer, adapter)
        a: Any = layer.lora_A[adapter].weight  # type: ignore[index, union-attr]
        b: Any = layer.lora_B[adapter].weight  # type: ignore[index, union-attr]
    else:
        adapter = ""
        a, b = getattr(layer, "lora_A", None), getattr(layer, "lora_B", None)
        if not isinstance(a, Tensor) or not isinstance(b, Tensor):
            _check_embedding(name, layer)
            return None
    if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1]:
        why = f"has A {list(a.shape)} and B {list(b.shape)}, not [r, in] and [out, r]"
        raise _refused(name, why, "target_modules without convolutions and the like")
    try:
        config = _config(layer, adapter, a)
    except ConfigError as error:
        raise EncodeError(f"LoRA of layer {name!r} cannot be published: {error}") from error
    _check_weight(name, layer, a, b, transposed=config.fan_in_fan_out)
    return LoraLayer(a, b, config, merged=bool(getattr(layer, "merged", False)))


def _active(name: str, layer: nn.Module) -> str | None:
    active: Any = getattr(layer, "active_adapters", None) or ["default"]
    embeddings: Any = getattr(layer, "lora_embedding_A", {})
    used = [name for name in active if name in layer.lora_A or name in embeddings]  # type: ignore[operator]
    if len(used) > 1:
        raise _refused(name, f"has {len(used)} active adapters", "set_adapter with one of them")
    return str(used[0]) if used else None


def _check_adapter(name: str, layer: nn.Module, adapter: str) -> None:
    """Refuse layers to which other methods of PEFT add more than A and B."""
    if adapter in getattr(layer, "lora_embedding_A", {}):
        _check_embedding(name, layer)
    if adapter in getattr(layer, "lora_magnitude_vector", {}) or _of(layer, "use_dora", adapter):
        raise _refused(name, "is DoRA: its magnitude is trained too", "use_dora=False")
    if adapter in getattr(layer, "lora_variant", {}):
        variant = type(_of(layer, "lora_variant", adapter)).__name__
        raise _refused(name, f"is a variant of LoRA, {variant}", "plain LoRA")
    if _of(layer, "lora_bias", adapter):
        raise _refused(name, "has a bias on B", "lora_bias=False")
    if hasattr(layer, "parameter_name"):
        raise _refused(name, "targets a parameter", "target_modules, not target_parameters")


def _check_embedding(name: str, layer: nn.Module) -> None:
    if len(getattr(layer, "lora_embedding_A", ())):
        raise _refused(name, "is an embedding", "target_modules without embeddings")


def _check_beside(name: str, layer: nn.Module) -> None:
    """Refuse modules that PEFT trains beside LoRA layers."""
    if len(_dict(layer, "modules_to_save")):
        raise _refused(name, "is trained as a whole", "modules_to_save=None")
    if len(_dict(layer, "trainable_tokens_delta")):
        raise _refused(name, "has trained tokens", "trainable_token_indices=None")
    configs: Any = getattr(layer, "peft_config", None)
    for config in configs.values() if isinstance(configs, dict) else ():
        bias = getattr(config, "bias", "none")
        if bias != "none":
            raise _refused(name, f"trains biases ({bias!r})", "bias='none'")


def _check_weight(name: str, layer: nn.Module, a: Tensor, b: Tensor, *, transposed: bool) -> None:
    base: Any = layer
    while isinstance(getattr(base, "base_layer", None), nn.Module):
        base = unwrapped(base.base_layer)
    if isinstance(base, nn.MultiheadAttention):
        raise _refused(name, f"is a {type(base).__name__}", "target_modules without it")
    weight = getattr(base, "weight", None)
    if not isinstance(weight, Tensor) or not weight.is_floating_point() or not weight.numel():
        return  # quantized weights are packed
    if hasattr(weight, "quant_state"):
        return
    product = (b.shape[0], a.shape[1])
    wanted = product[::-1] if transposed else product
    if tuple(weight.shape) != wanted:
        why = f"makes {list(wanted)}, and its weight is {list(weight.shape)}"
        raise _refused(name, why, "the right fan_in_fan_out")


def _config(layer: nn.Module, adapter: str, a: Tensor) -> LoraConfig:
    r = a.shape[0]
    config = LoraConfig(
        r=r,
        lora_alpha=float(_of(layer, "lora_alpha", adapter, r)),
        lora_dropout=_rate(_of(layer, "lora_dropout", adapter, 0.0)),
        # coati's embedding: A is [r, tokens], B [size, r], the weight [tokens, size]
        fan_in_fan_out=bool(getattr(layer, "fan_in_fan_out", False))
        or isinstance(layer, nn.Embedding),
        use_rslora=bool(_of(layer, "use_rslora", adapter)),
    )
    scaling = _of(layer, "scaling", adapter, config.scale)
    if not isinstance(scaling, int | float) or math.isclose(scaling, config.scale):
        return config
    # PEFT's set_scale changes the scale, but not lora_alpha
    return msgspec.structs.replace(config, lora_alpha=float(scaling) * r, use_rslora=False)


def _of(layer: nn.Module, name: str, adapter: str, default: Any = None) -> Any:
    """Return a setting of a layer, which PEFT keeps by adapter."""
    found: Any = getattr(layer, name, default)
    if not isinstance(found, dict | nn.ModuleDict):
        return found
    return found[adapter] if adapter in found else default  # noqa: SIM401 (ModuleDict has no get)


def _dict(layer: nn.Module, name: str) -> Any:
    found: Any = getattr(layer, name, ())
    return found if isinstance(found, nn.ModuleDict | nn.ParameterDict) else ()


def _rate(dropout: Any) -> float:
    if isinstance(dropout, nn.Module):
        return float(getattr(dropout, "p", 0.0))
    return float(dropout or 0.0)


def _refused(name: str, why: str, instead: str) -> EncodeError:
    return EncodeError(
        f"LoRA of layer {name!r} cannot be published: it {why}, but only lora_A and lora_B of "
        f"linear layers are published. Use {instead}, or publish all weights."
    )
