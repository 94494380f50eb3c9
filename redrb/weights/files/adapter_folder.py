"""LoRA as a PEFT adapter folder: `adapter_model.safetensors` and `adapter_config.json`.

`PeftModel.from_pretrained` reads it, and engines that swap adapters (vLLM, SGLang).
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from redrb.errors import ConfigError, DecodeError, EncodeError, WeightMismatch
from redrb.weights.files.folder_swap import exchange
from redrb.weights.files.safetensors import load_safetensors, read_json, save_safetensors
from redrb.weights.lora.adapter_state import lora_of_state
from redrb.weights.lora.config import LoraConfig
from redrb.weights.lora.names import PEFT_PREFIX, lora_name, pairs

TENSORS: Final = "adapter_model.safetensors"
SETTINGS: Final = "adapter_config.json"

_OLD: Final = frozenset({TENSORS, SETTINGS, "adapter_model.bin", "adapter_model.pt"})


def save_adapter(
    path: str | Path,
    tensors: Mapping[str, Tensor],
    configs: Mapping[str, LoraConfig],
    *,
    base_model: str | None = None,
    task_type: str | None = None,
) -> None:
    """Write LoRA into a folder, which appears, or replaces the one before, when it is complete.

    Engines give all layers of an adapter one scale, and read neither `rank_pattern` nor
    `alpha_pattern`. So where scales differ, B is written multiplied (in float32) so that one scale
    is right for all layers; else the tensors are written as they are. Dropout is the largest.

    An engine that reads while the folder is replaced may take its settings from the old one and
    its tensors from the new one: where settings change, give each version a path of its own.

    Args:
        path: Of the folder; other files in it stay if it holds an adapter.
        tensors: From `lora_of` or a subscriber: `<layer>.lora_A`, `<layer>.lora_B`.
        configs: Settings by layer.
        base_model: Name or path of the model that the adapter belongs to.
        task_type: PEFT's, such as "CAUSAL_LM"; None works with `PeftModel.from_pretrained`.

    Raises:
        EncodeError: The tensors are not plain LoRA, settings are missing, or layers differ in
            `fan_in_fan_out`, of which an adapter has one.
        ConfigError: The folder holds something else or cannot be written, or safetensors is not
            installed.
    """
    target = Path(path).resolve()
    layers = _layers(tensors, configs)
    settings = _settings(layers, base_model, task_type)
    written: dict[str, Tensor] = {}
    for name, layer in layers.items():
        written[f"{PEFT_PREFIX}{lora_name(name, 'A')}.weight"] = layer.a
        written[f"{PEFT_PREFIX}{lora_name(name, 'B')}.weight"] = layer.b
    with _replacing(target) as fresh:
        save_safetensors(fresh / TENSORS, written)
        text = json.dumps(settings, indent=2, sort_keys=True)
        (fresh / SETTINGS).write_text(text + "\n", encoding="utf-8")


def load_adapter(path: str | Path) -> tuple[dict[str, Tensor], dict[str, LoraConfig]]:
    """Return what `lora_of` would of the adapter in a folder, PEFT's or ours; on the CPU.

    Raises:
        ConfigError: There is none, or safetensors is not installed.
        DecodeError: It is damaged, or not plain LoRA of linear layers.
    """
    folder = Path(path)
    if not (folder / TENSORS).is_file():
        raise ConfigError(f"{folder} has no {TENSORS}: save the adapter as safetensors.")
    settings = read_json(folder / SETTINGS)
    try:
        return lora_of_state(load_safetensors(folder / TENSORS), settings)
    except EncodeError as error:
        raise DecodeError(f"the adapter in {folder} cannot be loaded: {error}") from error


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    a: Tensor
    b: Tensor
    config: LoraConfig


def _layers(tensors: Mapping[str, Tensor], configs: Mapping[str, LoraConfig]) -> dict[str, _Layer]:
    """Return layers by name, all with one scale and one kind of scale."""
    try:
        found = pairs(tensors)
    except WeightMismatch as error:
        raise EncodeError(str(error)) from error
    if not found:
        raise EncodeError("an adapter has at least one layer: there are no LoRA tensors.")
    for layer, (a, _) in found.items():
        if layer not in configs or configs[layer].r != a.shape[0]:
            raise EncodeError(f"LoRA of layer {layer!r} has no settings with r={a.shape[0]}.")
    layers = {name: _Layer(a, b, configs[name]) for name, (a, b) in found.items()}
    if len({layer.config.fan_in_fan_out for layer in layers.values()}) > 1:
        raise EncodeError(
            "some layers are fan_in_fan_out and others are not: save them as two adapters."
        )
    widest = _widest(layers)
    return {name: _with_scale(layer, widest) for name, layer in layers.items()}


def _widest(layers: Mapping[str, _Layer]) -> LoraConfig:
    return max((layer.config for layer in layers.values()), key=lambda config: config.r)


def _with_scale(layer: _Layer, like: LoraConfig) -> _Layer:
    """Return a layer with the same product, and the scale of `like`."""
    own = layer.config
    if own.use_rslora == like.use_rslora and math.isclose(own.scale, like.scale):
        return layer
    if not like.scale:
        raise EncodeError("a layer has lora_alpha=0, and others do not: leave it out.")
    alpha = like.scale * (math.sqrt(own.r) if like.use_rslora else own.r)
    config = LoraConfig(own.r, alpha, own.lora_dropout, own.fan_in_fan_out, like.use_rslora)
    same = math.isclose(own.scale, like.scale)
    return _Layer(layer.a, layer.b if same else layer.b.float() * (own.scale / like.scale), config)


def _settings(
    layers: Mapping[str, _Layer], base_model: str | None, task_type: str | None
) -> dict[str, Any]:
    """Return the fields of `peft.LoraConfig` that say what a reader needs."""
    widest = _widest(layers)  # engines reserve room for r
    configs = {f"^{re.escape(name)}": layer.config for name, layer in layers.items()}
    return {
        "peft_type": "LORA",
        "task_type": task_type,
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "r": widest.r,
        "lora_alpha": _plain(widest.lora_alpha),
        "lora_dropout": max(config.lora_dropout for config in configs.values()),
        "use_rslora": widest.use_rslora,
        "fan_in_fan_out": widest.fan_in_fan_out,
        "target_modules": sorted(layers),
        "rank_pattern": {
            name: config.r for name, config in configs.items() if config.r != widest.r
        },
        "alpha_pattern": {
            name: _plain(config.lora_alpha)
            for name, config in configs.items()
            if config.lora_alpha != widest.lora_alpha
        },
        "bias": "none",
        "init_lora_weights": True,
        "modules_to_save": None,
        "use_dora": False,
    }


def _plain(number: float) -> float:
    """Return an integer where it is one: PEFT's `lora_alpha` is declared so."""
    return int(number) if float(number).is_integer() else number


@contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """Give a new folder, which takes the place of `target` when the block ends well."""
    fresh = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        others = _others(target)
        fresh.mkdir()
        try:
            yield fresh
            for other in others:
                _keep(other, fresh / other.name)
            exchange(fresh, target)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error}.") from error


def _others(target: Path) -> list[Path]:
    """Return the files beside the adapter in a folder that is about to be replaced."""
    if not target.exists():
        return []
    inside = list(target.iterdir()) if target.is_dir() else None
    if inside is None or (inside and not (target / SETTINGS).is_file()):
        raise ConfigError(f"{target} is there already, and is no adapter: choose another path.")
    folders = [other.name for other in inside if other.is_dir()]
    if folders:
        raise ConfigError(f"{target} has the folder {folders[0]!r} in it: choose another path.")
    return [other for other in inside if other.name not in _OLD]


def _keep(other: Path, new: Path) -> None:
    try:
        os.link(other, new, follow_symlinks=False)
    except OSError:  # not on this file system
        shutil.copy2(other, new, follow_symlinks=False)
