"""Log-probabilities of chosen tokens, and entropies, without a float32 copy of all logits.

A batch of logits is the largest tensor of a training step: 8 samples of 4,096 actions with a
vocabulary of 128,000 take 8 GB in bfloat16. `log_softmax` in float32 would add two such copies of
twice that size. Here only a part of the logits is float32 at a time, forward and backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from redrb.errors import RecordError

PART_ELEMENTS = 1 << 24
"""Number of logits that are float32 at a time: 64 MiB, or one token if that is more."""


def chosen_log_probs(logits: Tensor, tokens: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Return the log-probability of each token, float32 `[B, T]` (float64 for float64 logits).

    Differentiable once, in `logits`; only these are kept for the backward pass.

    Args:
        logits: Logits that chose the tokens, `[B, T, V]`, any float dtype.
        tokens: Token ids, int64 `[B, T]`.
        temperature: Divides the logits.
    """
    chosen: Tensor = _Chosen.apply(logits, tokens, temperature)  # type: ignore[no-untyped-call]
    return chosen


def action_log_probs(
    logits: Tensor, sequences: Tensor, actions: int, *, temperature: float = 1.0
) -> Tensor:
    """Return the log-probability of the last `actions` tokens, float32 `[B, A]`.

    Args:
        logits: Logits of a causal model, `[B, S, V]`, where each position predicts the next token;
            or only those that chose the actions, `[B, A, V]`.
        sequences: Token ids, int64 `[B, S]`, on any device.
        actions: A, less than S.
        temperature: Divides the logits.

    Raises:
        RecordError: The logits have another shape.
    """
    return chosen_log_probs(
        choosing_logits(logits, sequences.shape[1], actions),
        sequences[:, -actions:].to(logits.device),
        temperature=temperature,
    )


def choosing_logits(logits: Tensor, length: int, actions: int) -> Tensor:
    """Return the logits of a causal model that chose the last A tokens, a view `[B, A, V]`.

    Args:
        logits: All logits `[B, S, V]`, the last A + 1 positions, or the A positions themselves.

    Raises:
        RecordError: The logits have another shape, or there are too many actions.
    """
    if not 0 < actions < length:
        raise RecordError(
            f"{actions} actions in a sequence of {length} tokens: there must be at least one, and "
            "fewer than tokens, because no logits chose the first token.",
            field="action_log_probs",
        )
    if logits.dim() == 3 and logits.shape[1] == actions:
        return logits
    if logits.dim() == 3 and logits.shape[1] in (length, actions + 1):
        return logits[:, -actions - 1 : -1]
    raise RecordError(
        f"the logits have shape {list(logits.shape)}, not [B, {length}, V] for {length} tokens or "
        f"[B, {actions}, V] for {actions} actions."
    )


def entropy(logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Return the entropy of each distribution in nats, float32 `[B, T]` of `[B, T, V]`.

    With gradients it keeps float32 copies of all logits: measure under `torch.no_grad`.
    """
    found = torch.zeros((), device=logits.device)
    for at in _parts(logits):
        log_probs = (_wide(logits[at]) / temperature).log_softmax(-1)
        # an excluded token has -inf, and 0 * -inf is nan
        bounded = log_probs.clamp(min=torch.finfo(log_probs.dtype).min)
        of_part = -(log_probs.exp() * bounded).sum(-1)
        if of_part.shape == logits.shape[:-1]:
            return of_part
        found = found if found.dim() else of_part.new_zeros(logits.shape[:-1])
        found[at] = of_part
    return found


class _Chosen(torch.autograd.Function):
    """`(logits / temperature).log_softmax(-1)` at the chosen tokens, part by part."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
        at = tokens.unsqueeze(-1)
        chosen = _wide(logits.gather(-1, at).squeeze(-1)) / temperature
        normaliser = torch.empty_like(chosen)
        for part in _parts(logits):
            normaliser[part] = (_wide(logits[part]) / temperature).logsumexp(-1)
        ctx.save_for_backward(logits, at, normaliser)
        ctx.temperature = temperature
        return chosen - normaliser

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        logits, at, normaliser = ctx.saved_tensors
        gradient = (gradient / ctx.temperature).unsqueeze(-1)
        out = torch.empty_like(logits)
        for part in _parts(logits):
            of_part = _wide(logits[part]).div(ctx.temperature)
            of_part.sub_(normaliser[part].unsqueeze(-1)).exp_().mul_(-gradient[part])
            out[part] = of_part.scatter_add_(-1, at[part], gradient[part])
        return out, None, None


def _parts(logits: Tensor) -> Iterator[tuple[slice, slice]]:
    batch, length, vocabulary = logits.shape
    tokens = max(1, PART_ELEMENTS // max(1, vocabulary))
    rows = max(1, tokens // max(1, length))
    for row in range(0, batch, rows):
        for token in range(0, length, tokens):
            yield slice(row, row + rows), slice(token, token + tokens)


def _wide(tensor: Tensor) -> Tensor:
    """Return a tensor as float32, or unchanged if its dtype is wider."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
