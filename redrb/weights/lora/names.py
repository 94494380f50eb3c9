"""Names of LoRA's tensors: ColossalAI's, PEFT's, and the names that are published."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

from torch import Tensor

from redrb.errors import WeightMismatch

PEFT_PREFIX: Final = "base_model.model."

# coati: <layer>.lora_A; PEFT: base_model.model.<layer>.lora_A[.<adapter>].weight
_NAME = re.compile(r"(?:(.+)\.)?lora_([AB])(?:(?:\.[^.]+)?\.weight)?")


def lora_name(layer: str, half: str) -> str:
    """Return the published name of a layer's `half`, "A" or "B": `<layer>.lora_A`."""
    return f"{layer}.lora_{half}" if layer else f"lora_{half}"


def layer_name(name: str) -> str:
    """Return a layer's name in the model without LoRA, without PEFT's prefix of any of its parts.

    One of several models has the prefix behind its own name: `actor.base_model.model.<layer>`.
    """
    return f".{name}.".replace(f".{PEFT_PREFIX}", ".")[1:-1]


def base_names(names: Iterable[str]) -> dict[str, str]:
    """Return the names that tensors of a PEFT model have, by the names they have without LoRA.

    Those of `lora_A` and `lora_B` are left out.
    """
    return {
        layer_name(name).replace(".base_layer.", "."): name
        for name in names
        if _NAME.fullmatch(name) is None
    }


def pairs(state: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return A `[r, in]` and B `[out, r]` by layer, or raise WeightMismatch."""
    halves: dict[str, dict[str, Tensor]] = {}
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):
            raise WeightMismatch(f"{name!r} is a {type(tensor).__name__}, not a tensor.")
        matched = _NAME.fullmatch(name)
        if matched is None:
            raise WeightMismatch(
                f"{name!r} is not a LoRA tensor: only lora_A and lora_B are published."
            )
        half = halves.setdefault(layer_name(matched[1] or ""), {})
        if matched[2] in half:
            raise WeightMismatch(f"{name!r} comes twice: give the tensors of one adapter.")
        half[matched[2]] = tensor
    found = {}
    for layer, half in halves.items():
        if half.keys() != {"A", "B"}:
            raise WeightMismatch(f"LoRA of layer {layer!r} has only lora_{next(iter(half))}.")
        a, b = half["A"], half["B"]
        if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1] or not a.shape[0]:
            raise WeightMismatch(
                f"LoRA of layer {layer!r} is {list(a.shape)} and {list(b.shape)}, not [r, in] and "
                "[out, r]: only linear layers are supported."
            )
        found[layer] = a, b
    return found
