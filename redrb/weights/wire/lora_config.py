"""`LoraConfig`, the checked settings of a LoRA layer."""

from __future__ import annotations

import math
from typing import Any, Final

import msgspec

from redrb.errors import ConfigError

MAX_RANK: Final = 1 << 20


class LoraConfig(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False
):
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


def _is_finite(value: object) -> bool:
    if type(value) is int:
        return abs(value) < 2**63  # larger ones cannot be packed
    return type(value) is float and math.isfinite(value)
