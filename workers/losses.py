"""PPO's formulas on padded actions, without networks or records.

Source: Schulman et al. 2017, "Proximal Policy Optimization Algorithms", arXiv:1707.06347.
Everywhere `mask` is True where an action counts, bool `[B, A]`; what stands elsewhere has no
effect.
"""

from __future__ import annotations

import torch
from torch import Tensor


def policy_loss(ratio: Tensor, advantages: Tensor, mask: Tensor, *, clip: float) -> Tensor:
    """Return `-mean(min(ratio * A, clamp(ratio, 1 - clip, 1 + clip) * A))`, float32 `[]`.

    Args:
        ratio: Probability of each action now over then, float32 `[B, A]`.
        advantages: float32 `[B, A]`.
        mask: True where an action counts, bool `[B, A]`.
        clip: Epsilon of equation 7.
    """
    clipped = ratio.clamp(1 - clip, 1 + clip)
    return -masked_mean(torch.minimum(ratio * advantages, clipped * advantages), mask)


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip: float
) -> Tensor:
    """Return half the mean squared error of the values, float32 `[]`, all arguments `[B, A]`.

    The larger of two errors counts: of the value, and of the value held within `clip` of the old
    one (as in the PPO of OpenAI Baselines and of `coati`).
    """
    clipped = old_values + (values - old_values).clamp(-clip, clip)
    errors = torch.maximum((values - returns).square(), (clipped - returns).square())
    return 0.5 * masked_mean(errors, mask)


def entropy(logits: Tensor) -> Tensor:
    """Return the entropy of each distribution in nats, float32 `[B, A]` of `[B, A, vocabulary]`."""
    log_probs = logits.log_softmax(-1)
    return -(log_probs.exp() * log_probs).sum(-1)


def normalised(advantages: Tensor, mask: Tensor) -> Tensor:
    """Return advantages with mean 0 and variance 1 over the actions that count, `[B, A]`."""
    mean = masked_mean(advantages, mask)
    variance = masked_mean((advantages - mean).square(), mask)
    return (advantages - mean) / (variance.sqrt() + 1e-8)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of the values where `mask` is True, float32 `[]`; 0 where it never is."""
    return values.masked_fill(~mask, 0.0).sum() / mask.sum().clamp(min=1)
