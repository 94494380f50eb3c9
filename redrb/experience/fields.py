"""The names of the standard fields, and types of metadata; imported without torch.

The eight standard fields and their order are those of ColossalAI's ColossalChat (`coati`).
"""

from __future__ import annotations

from typing import Literal, TypeAlias

STANDARD_FIELDS = (
    "sequences",
    "action_log_probs",
    "values",
    "reward",
    "kl",
    "advantages",
    "attention_mask",
    "action_mask",
)
"""The eight standard fields, always in this order."""

TENSOR_FIELDS = (*STANDARD_FIELDS, "token_versions")
"""All fields that hold a tensor; further tensors are in `tensors`, by name."""

SESSION = "redrb_session"
"""Key in the extras of samples from a gateway: the id of their session, which no agent can set."""

Scalar: TypeAlias = str | int | float | bool
Shape: TypeAlias = tuple[int, ...]
Side: TypeAlias = Literal["left", "right"]
