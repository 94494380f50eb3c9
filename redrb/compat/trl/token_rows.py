"""Samples of a task as TRL's lists of token ids and log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from redrb.errors import RecordError
from redrb.experience import BufferItem


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One sample without padding.

    Attributes:
        log_probs: The maker's log-probability of each token of the completion; 0 where
            `trained` is False.
        trained: Whether the policy chose the token; False for answers of tools.
    """

    prompt: list[int]
    completion: list[int]
    log_probs: list[float]
    trained: list[bool]


def token_row(item: BufferItem) -> TokenRow:
    """Return prompt, completion and log-probabilities of a sample, or raise RecordError."""
    sequences, log_probs = item.sequences, item.action_log_probs
    if sequences is None or sequences.dim() != 1 or sequences.is_floating_point():
        raise RecordError("a sample needs token ids, int64 [S].", field="sequences")
    if log_probs is None or log_probs.dim() != 1:
        raise RecordError(
            "a sample needs the log-probability of each token of its completion, float32 [A]: the "
            "maker has them when it samples.",
            field="action_log_probs",
        )
    actions, start = len(log_probs), len(sequences) - len(log_probs)
    if not 0 < actions < len(sequences):
        raise RecordError(
            f"{actions} log-probabilities for {len(sequences)} tokens: the last A tokens are the "
            "completion, and those before them the prompt.",
            field="action_log_probs",
        )
    real = _mask(item.attention_mask, len(sequences), "attention_mask")
    chosen = _mask(item.action_mask, actions, "action_mask")
    here = real[start:] | chosen
    if not here.any() or not real[:start].any():
        raise RecordError("prompt or completion has no token.", field="attention_mask")
    return TokenRow(
        prompt=sequences[:start][real[:start]].tolist(),
        completion=sequences[start:][here].tolist(),
        log_probs=torch.where(chosen, log_probs.float(), 0.0)[here].tolist(),
        trained=chosen[here].tolist(),
    )


def check_group_size(group: Sequence[BufferItem], expected: int) -> None:
    """Raise RecordError if a group has another number of samples than TRL expects."""
    if len(group) != expected:
        raise RecordError(
            f"a group of {len(group)} samples for num_generations={expected}: let the makers put "
            f"groups of {expected}, or set num_generations={len(group)} in the GRPOConfig.",
        )


def _mask(mask: torch.Tensor | None, length: int, name: str) -> torch.Tensor:
    if mask is None:
        return torch.ones(length, dtype=torch.bool)
    if mask.shape != (length,):
        raise RecordError(f"{name} has shape {tuple(mask.shape)}, not ({length},).", field=name)
    return mask.bool()
