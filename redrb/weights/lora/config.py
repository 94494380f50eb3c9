"""`LoraConfig`, the settings of a LoRA layer: checked, and to plain values and back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from redrb.errors import ConfigError, DecodeError

MAX_LAYERS: Final = 1 << 18
MAX_RANK: Final = 1 << 20
MAX_LAYER_LENGTH: Final = 1024


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Settings of one layer; names as in ColossalAI's `coati.models.lora` and in PEFT.

    Attributes:
        r: Rank, >= 1.
        lora_alpha: The product of B and A is scaled by `lora_alpha / r`.
        lora_dropout: Dropout in training; merged weights have none.
        fan_in_fan_out: Whether the layer's weight is stored transposed, `[in, out]`.
        use_rslora: Whether the scale is `lora_alpha / sqrt(r)` instead (Kalajdzievski 2023,
            arXiv:2312.03732).

    Raises:
        ConfigError: A setting has a wrong type, or is out of its range.
    """

    r: int
    lora_alpha: float
    lora_dropout: float = 0.0
    fan_in_fan_out: bool = False
    use_rslora: bool = False

    def __post_init__(self) -> None:
        if type(self.r) is not int or not 1 <= self.r <= MAX_RANK:
            raise ConfigError(f"LoRA: r is {self.r!r:.40}, not an integer 1 to {MAX_RANK}.")
        if not _is_finite(self.lora_alpha):
            raise ConfigError(f"LoRA: lora_alpha is {self.lora_alpha!r:.40}, not a finite number.")
        if not _is_finite(self.lora_dropout) or not 0 <= self.lora_dropout <= 1:
            raise ConfigError(f"LoRA: lora_dropout is {self.lora_dropout!r:.40}, not 0 to 1.")
        for name in ("fan_in_fan_out", "use_rslora"):
            if type(getattr(self, name)) is not bool:
                raise ConfigError(f"LoRA: {name} is {getattr(self, name)!r:.40}, not a bool.")

    @property
    def scale(self) -> float:
        """Factor of the product of B and A (Hu et al. 2021, section 4.1)."""
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)

    @classmethod
    def of(cls, settings: Any) -> LoraConfig:
        """Return the settings in any object with attributes of these names, such as coati's.

        Raises:
            ConfigError: `r` or `lora_alpha` is missing, or a value is wrong.
        """
        if isinstance(settings, cls):
            return settings
        try:
            r, alpha = int(settings.r), float(settings.lora_alpha)
        except (AttributeError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{settings!r:.80} is no LoraConfig: it needs r and lora_alpha."
            ) from error
        return cls(
            r,
            alpha,
            fan_in_fan_out=bool(getattr(settings, "fan_in_fan_out", False)),
            use_rslora=bool(getattr(settings, "use_rslora", False)),
        )


_FIELDS: Final = tuple(field.name for field in fields(LoraConfig))


def configs_to_wire(configs: Mapping[str, LoraConfig]) -> dict[str, list[Any]]:
    """Return settings by layer as lists of plain values, in the order of `LoraConfig`'s fields."""
    return {
        layer: [
            config.r,
            float(config.lora_alpha),
            float(config.lora_dropout),
            config.fan_in_fan_out,
            config.use_rslora,
        ]
        for layer, config in configs.items()
    }


def configs_from_wire(obj: object) -> dict[str, LoraConfig]:
    """Return settings by layer from plain values of the network, after checking all of them."""
    if not isinstance(obj, dict) or len(obj) > MAX_LAYERS:
        raise DecodeError(f"settings of LoRA layers are not a map of at most {MAX_LAYERS}.")
    configs: dict[str, LoraConfig] = {}
    for layer, values in obj.items():
        if not isinstance(layer, str) or len(layer) > MAX_LAYER_LENGTH:
            raise DecodeError(f"settings of LoRA layers: {layer!r:.80} is not a layer's name.")
        if not isinstance(values, list) or len(values) != len(_FIELDS):
            raise DecodeError(
                f"settings of LoRA layer {layer!r:.80} are not {len(_FIELDS)} values."
            )
        try:
            configs[layer] = LoraConfig(**dict(zip(_FIELDS, values, strict=True)))
        except (ConfigError, TypeError) as error:
            raise DecodeError(f"settings of LoRA layer {layer!r:.80}: {error}") from error
    return configs


def _is_finite(value: object) -> bool:
    if type(value) not in (int, float):
        return False
    try:
        return math.isfinite(value)  # type: ignore[arg-type]
    except OverflowError:
        return False
