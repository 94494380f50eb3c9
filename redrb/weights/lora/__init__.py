"""LoRA adapters: settings, a model's layers, checks, and the exact merge into base weights."""

from redrb.weights.lora.adapter import adapter_of
from redrb.weights.lora.adapter_state import lora_of_state
from redrb.weights.lora.config import LoraConfig, configs_from_wire, configs_to_wire
from redrb.weights.lora.layers import lora_of
from redrb.weights.lora.merging import LoraMerger, merged

__all__ = [
    "LoraConfig",
    "LoraMerger",
    "adapter_of",
    "configs_from_wire",
    "configs_to_wire",
    "lora_of",
    "lora_of_state",
    "merged",
]
