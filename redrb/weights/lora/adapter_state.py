"""LoRA from an adapter's state dict and PEFT's settings, without a model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from torch import Tensor

from redrb.errors import ConfigError, EncodeError, WeightMismatch
from redrb.weights.lora.adapter import check_rank
from redrb.weights.lora.names import lora_name, pairs
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
