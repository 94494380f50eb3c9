"""LoRA as a PEFT adapter folder: `adapter_model.safetensors` and `adapter_config.json`.

`PeftModel.from_pretrained` reads such folders, and so do engines that swap adapters (vLLM, SGLang).
"""

from __future__ import annotations

import ctypes
import errno
import json
import math
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from redrb.errors import ConfigError, DecodeError, EncodeError, WeightMismatch
from redrb.staging import staging
from redrb.weights.files.safetensors import load_safetensors, read_json, save_safetensors
from redrb.weights.lora.adapter import check_rank
from redrb.weights.lora.layers import LoraLayer
from redrb.weights.lora.names import PEFT_PREFIX, lora_name, pairs
from redrb.weights.wire.lora_config import LoraConfig

# fields of peft.LoraConfig that make an adapter more than A and B of linear layers
_MORE: Final = (
    "use_dora",
    "use_qalora",
    "use_bdlora",
    "lora_bias",
    "modules_to_save",
    "target_parameters",
    "trainable_token_indices",
    "layer_replication",
    "alora_invocation_tokens",
    "arrow_config",
    "velora_config",
    "monteclora_config",
    "kasa_config",
)

_CHANGE_BASE: Final = ("pissa", "olora", "corda", "loftq", "lora_ga")


def lora_of_state(
    state: Mapping[str, Tensor], config: LoraConfig | Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, LoraConfig]]:
    """Return A, B and settings as `lora_of` does, from an adapter's tensors alone.

    Args:
        state: Tensors of one adapter, as ColossalAI or PEFT names them.
        config: Settings of all layers, or the content of PEFT's `adapter_config.json`: `r`,
            `lora_alpha`, `rank_pattern`, `alpha_pattern` ...
    """
    try:
        found = pairs(state)
        ranks = {layer: a.shape[0] for layer, (a, _) in found.items()}
        if isinstance(config, LoraConfig):
            for layer, rank in ranks.items():
                check_rank(layer, rank, config.r)
            configs = dict.fromkeys(ranks, config)
        else:
            configs = _of_peft(ranks, config)
    except (WeightMismatch, ConfigError) as error:
        raise EncodeError(str(error)) from error
    tensors = {
        lora_name(layer, half): tensor
        for layer, halves in found.items()
        for half, tensor in zip("AB", halves, strict=True)
    }
    return tensors, configs


def _of_peft(ranks: Mapping[str, int], settings: Mapping[str, Any]) -> dict[str, LoraConfig]:
    _check_plain(settings)
    rank_of = _patterns(settings, "rank_pattern")
    alpha_of = _patterns(settings, "alpha_pattern")
    configs = {}
    for layer, rank in ranks.items():
        check_rank(layer, rank, _matching(rank_of, layer, settings.get("r", 8)))
        configs[layer] = LoraConfig(
            r=rank,
            lora_alpha=_matching(alpha_of, layer, settings.get("lora_alpha", 8)),
            lora_dropout=settings.get("lora_dropout") or 0.0,
            fan_in_fan_out=settings.get("fan_in_fan_out") or False,
            use_rslora=settings.get("use_rslora") or False,
        )
    return configs


def _check_plain(settings: Mapping[str, Any]) -> None:
    if settings.get("peft_type", "LORA") != "LORA":
        raise ConfigError(f"the adapter is {settings['peft_type']!r:.40}: only LORA is supported.")
    more = [name for name in _MORE if settings.get(name)]
    if settings.get("bias", "none") != "none":
        more.append("bias")
    if more:
        raise ConfigError(
            f"the adapter has {', '.join(more)}: it is more than lora_A and lora_B of linear "
            "layers. Train it without them, or publish all weights."
        )
    start = settings.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGE_BASE):
        raise ConfigError(
            f"the adapter was initialized by {start!r:.40}, which changed the base weights too: "
            "convert it first, as PEFT's path_initial_model_for_weight_conversion does."
        )


def _patterns(settings: Mapping[str, Any], which: str) -> list[tuple[re.Pattern[str], Any]]:
    """Return a setting's patterns, as PEFT's `get_pattern_key` reads them."""
    patterns = settings.get(which) or {}
    if not isinstance(patterns, Mapping):
        raise ConfigError(f"{which} of the adapter is a {type(patterns).__name__}, not a map.")
    try:
        return [(re.compile(rf"(.*\.)?({key})$"), value) for key, value in patterns.items()]
    except (re.error, RecursionError, OverflowError) as error:
        raise ConfigError(f"{which} of the adapter is not a map of patterns: {error}.") from error


def _matching(patterns: list[tuple[re.Pattern[str], Any]], layer: str, default: Any) -> Any:
    return next((value for pattern, value in patterns if pattern.match(layer)), default)


TENSORS: Final = "adapter_model.safetensors"

SETTINGS: Final = "adapter_config.json"

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_UNKNOWN = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)

_OLD: Final = frozenset({TENSORS, SETTINGS, "adapter_model.bin", "adapter_model.pt"})


def save_adapter(
    path: str | Path,
    tensors: Mapping[str, Tensor],
    configs: Mapping[str, LoraConfig],
    *,
    base_model: str | None = None,
    task_type: str | None = None,
) -> None:
    """Write LoRA into a folder, which appears, or replaces an earlier one, when it is complete.

    Engines use one scale for all layers of an adapter, and read neither `rank_pattern` nor
    `alpha_pattern`. So if scales differ, B is multiplied (in float32) such that one scale is right
    for all layers; otherwise the tensors are written unchanged. The dropout is the largest of all.

    An engine that reads while the folder is replaced may take the old settings and the new tensors:
    if settings change, give each version another path.

    Args:
        path: The folder; if it holds an adapter, its other files stay.
        tensors: From `lora_of` or a subscriber: `<layer>.lora_A`, `<layer>.lora_B`.
        base_model: Name or path of the model that the adapter belongs to.
        task_type: PEFT's task type, such as "CAUSAL_LM"; `PeftModel.from_pretrained` accepts None.

    Raises:
        EncodeError: The tensors are not plain LoRA, settings are missing, or layers differ in
            `fan_in_fan_out`, which an adapter has only once.
        ConfigError: The folder holds other files than an adapter's, or cannot be written, or
            safetensors is not installed.
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
    """Return A, B and settings of the adapter in a folder of PEFT or redrb, on the CPU.

    Raises:
        ConfigError: The folder has no adapter, or safetensors is not installed.
        DecodeError: The adapter is damaged, or not plain LoRA of linear layers.
    """
    folder = Path(path)
    if not (folder / TENSORS).is_file():
        raise ConfigError(f"{folder} has no {TENSORS}: save the adapter as safetensors.")
    settings = read_json(folder / SETTINGS)
    try:
        return lora_of_state(load_safetensors(folder / TENSORS), settings)
    except EncodeError as error:
        raise DecodeError(f"the adapter in {folder} cannot be loaded: {error}") from error


def _layers(
    tensors: Mapping[str, Tensor], configs: Mapping[str, LoraConfig]
) -> dict[str, LoraLayer]:
    """Return layers by name, B multiplied such that all layers have the same scale."""
    try:
        found = pairs(tensors)
    except WeightMismatch as error:
        raise EncodeError(str(error)) from error
    if not found:
        raise EncodeError("there are no LoRA tensors: an adapter needs at least one layer.")
    for layer, (a, _) in found.items():
        if layer not in configs or configs[layer].r != a.shape[0]:
            raise EncodeError(f"LoRA of layer {layer!r} has no settings with r={a.shape[0]}.")
    layers = {name: LoraLayer(a, b, configs[name]) for name, (a, b) in found.items()}
    if len({layer.config.fan_in_fan_out for layer in layers.values()}) > 1:
        raise EncodeError(
            "some layers are fan_in_fan_out and others are not: save them as two adapters."
        )
    widest = _widest(layers)
    return {name: _with_scale(layer, widest) for name, layer in layers.items()}


def _widest(layers: Mapping[str, LoraLayer]) -> LoraConfig:
    return max((layer.config for layer in layers.values()), key=lambda config: config.r)


def _with_scale(layer: LoraLayer, like: LoraConfig) -> LoraLayer:
    """Return a layer with the same scaled product, and the scale of `like`."""
    config = layer.config
    if config.use_rslora == like.use_rslora and math.isclose(config.scale, like.scale):
        return layer
    if not like.scale:
        raise EncodeError("a layer has lora_alpha=0, but other layers do not: leave it out.")
    alpha = like.scale * (math.sqrt(config.r) if like.use_rslora else config.r)
    scaled = LoraConfig(
        config.r, alpha, config.lora_dropout, config.fan_in_fan_out, like.use_rslora
    )
    same = math.isclose(config.scale, like.scale)
    b = layer.b if same else layer.b.float() * (config.scale / like.scale)
    return LoraLayer(layer.a, b, scaled)


def _settings(
    layers: Mapping[str, LoraLayer], base_model: str | None, task_type: str | None
) -> dict[str, Any]:
    """Return the fields of `peft.LoraConfig` that readers need."""
    widest = _widest(layers)  # engines allocate memory for r
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
    return int(number) if float(number).is_integer() else number


@contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """Yield a new folder, which replaces `target` if the block ends well."""
    try:
        others = _others(target)
        with staging(target) as folder:
            fresh = folder / target.name
            fresh.mkdir()
            yield fresh
            for other in others:
                _keep(other, fresh / other.name)
            exchange(fresh, target)
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error}.") from error


def _others(target: Path) -> list[Path]:
    if not target.exists():
        return []
    inside = list(target.iterdir()) if target.is_dir() else None
    if inside is None or (inside and not (target / SETTINGS).is_file()):
        raise ConfigError(f"{target} exists and is no adapter: choose another path.")
    folders = [other.name for other in inside if other.is_dir()]
    if folders:
        raise ConfigError(f"{target} contains the folder {folders[0]!r}: choose another path.")
    return [other for other in inside if other.name not in _OLD]


def _keep(other: Path, new: Path) -> None:
    try:
        os.link(other, new, follow_symlinks=False)
    except OSError:  # this file system has no links
        shutil.copy2(other, new, follow_symlinks=False)


def exchange(fresh: Path, target: Path) -> None:
    """Exchange the folders `fresh` and `target`; if `target` does not exist, only rename `fresh`.

    `target` exists at every moment, except on file systems without `renameat2` (Linux's manual,
    rename(2)), such as NFS: there it is missing between two renames.

    Raises:
        OSError: The exchange failed; `target` is unchanged.
    """
    if not target.exists():
        fresh.rename(target)
        return
    names = os.fsencode(fresh), os.fsencode(target)
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)  # not in glibc before 2.28
    try:
        if call is None or call(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE):
            code = errno.ENOSYS if call is None else ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(target))
    except OSError as error:
        if error.errno not in _UNKNOWN:
            raise
        aside = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
        target.rename(aside)
        try:
            fresh.rename(target)
        except OSError:
            aside.rename(target)
            raise
        aside.rename(fresh)
