"""LoRA adapters: settings, a model's layers, checks, and the exact merge into base weights."""

from redrb.weights.lora.adapter import adapter_of
from redrb.weights.lora.adapter_state import lora_of_state
from redrb.weights.lora.layers import lora_of
from redrb.weights.lora.merging import LoraMerger, merged
from redrb.weights.wire.lora_config import LoraConfig

__all__ = [
    "LoraConfig",
    "LoraMerger",
    "adapter_of",
    "lora_of",
    "lora_of_state",
    "merged",
]
