"""Losses of PPO and GRPO on padded actions.

Sources: Schulman et al. 2017 (PPO, arXiv:1707.06347), Shao et al. 2024 (GRPO, arXiv:2402.03300),
Yu et al. 2025 (DAPO, arXiv:2503.14476), and the losses of ColossalAI's `coati`.
In all functions `mask` is True where an action counts, bool `[B, A]`; values elsewhere have no
effect, not even nan. Log-probabilities are of the actions that were taken.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from redrb.algorithms.aggregation import Aggregation, Totals, aggregate, check_choice
from redrb.errors import ConfigError

KLEstimator: TypeAlias = Literal["k1", "k2", "k3", "coati"]
"""k1 to k3 of Schulman 2020, "Approximating KL Divergence", and `coati`'s; see `kl_estimate`."""

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this range: beyond it, exp() makes gradients that are not finite."""


def action_ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    """Return the ratio of new to old probability of each action, float32 `[B, A]`, 1 on padding."""
    return _log_ratio(log_probs, old_log_probs, mask).exp()


def policy_loss(
    ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip: float,
    clip_high: float | None = None,
    aggregation: Aggregation = "token",
    weights: Tensor | None = None,
    totals: Totals | None = None,
) -> Tensor:
    """Return `-mean(min(ratio * A, clamp(ratio, 1 - clip, 1 + clip_high) * A))`, float32 `[]`.

    With aggregation "sequence" this is `coati`'s policy loss.

    Args:
        ratio: Ratio of new to old probability of each action, float32 `[B, A]`.
        advantages: float32 `[B, A]`.
        mask: True where an action counts, bool `[B, A]`.
        clip: Epsilon of PPO's equation 7.
        clip_high: The upper epsilon (DAPO's "clip higher", 0.28 there); None: `clip`.
        aggregation: How losses of actions become one number.
        weights: Importance weight of each sample or action, `[B, 1]` or `[B, A]`.
        totals: As for `redrb.algorithms.aggregation.aggregate`.
    """
    advantages = advantages.masked_fill(~mask, 0.0)
    clipped = ratio.clamp(1 - clip, 1 + (clip if clip_high is None else clip_high))
    losses = -torch.minimum(ratio * advantages, clipped * advantages)
    return aggregate(losses, mask, aggregation=aggregation, weights=weights, totals=totals)


def value_loss(
    values: Tensor,
    old_values: Tensor,
    targets: Tensor,
    mask: Tensor,
    *,
    clip: float | None,
    aggregation: Aggregation = "token",
    weights: Tensor | None = None,
    totals: Totals | None = None,
) -> Tensor:
    """Return half the mean squared error of the values, float32 `[]`, tensors `[B, A]`.

    The larger of two errors counts: that of the value, and that of the value clipped to within
    `clip` of the old value (as in OpenAI Baselines and `coati`; targets are the samples' rewards
    in `coati`, otherwise the returns `advantages + old values`). `clip` None: no clipping.
    """
    values, old_values, targets = (
        tensor.masked_fill(~mask, 0.0) for tensor in (values, old_values, targets)
    )
    errors = (values - targets).square()
    if clip is not None:
        clipped = old_values + (values - old_values).clamp(-clip, clip)
        errors = torch.maximum(errors, (clipped - targets).square())
    return 0.5 * aggregate(errors, mask, aggregation=aggregation, weights=weights, totals=totals)


def grpo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip: float,
    clip_high: float | None = None,
    beta: float = 0.0,
    reference_log_probs: Tensor | None = None,
    aggregation: Aggregation = "token",
    weights: Tensor | None = None,
    policy_weights: Tensor | None = None,
    totals: Totals | None = None,
) -> Tensor:
    """Return GRPO's loss, equation 3 of the paper negated, float32 `[]`.

    The clipped policy loss with group-relative advantages, plus `beta` times the estimate k3 of the
    divergence from the reference policy. The paper aggregates by "sequence", DAPO by "token".

    Args:
        log_probs: Log-probabilities of the actor in training, float32 `[B, A]`.
        old_log_probs: Log-probabilities of the policy that sampled, float32 `[B, A]`.
        advantages: float32 `[B, A]`; in GRPO the same for all actions of a sample.
        mask: True where an action counts, bool `[B, A]`.
        clip: The lower epsilon.
        clip_high: The upper epsilon (DAPO's "clip higher"); None: `clip`.
        beta: Price of the divergence; the paper has 0.04, DAPO 0.
        reference_log_probs: Log-probabilities of the reference policy, float32 `[B, A]`; needed
            unless `beta` is 0.
        aggregation: How losses of actions become one number.
        weights: Importance weight of each sample or action, `[B, 1]` or `[B, A]`.
        policy_weights: Weights of the policy loss alone, not of the divergence, `[B, A]`, such as
            those of `truncated_importance`.
        totals: As for `redrb.algorithms.aggregation.aggregate`.

    Raises:
        ConfigError: `beta` is not 0 and there are no reference log-probabilities.
    """
    loss = policy_loss(
        action_ratio(log_probs, old_log_probs, mask),
        advantages,
        mask,
        clip=clip,
        clip_high=clip_high,
        aggregation=aggregation,
        weights=product(weights, policy_weights),
        totals=totals,
    )
    if beta == 0:
        return loss
    if reference_log_probs is None:
        raise ConfigError(f"beta {beta} needs reference_log_probs: give them, or set beta=0.")
    kl = kl_estimate(log_probs, reference_log_probs, mask, estimator="k3")
    return loss + beta * aggregate(
        kl, mask, aggregation=aggregation, weights=weights, totals=totals
    )


def kl_estimate(
    log_probs: Tensor,
    reference_log_probs: Tensor,
    mask: Tensor,
    *,
    estimator: KLEstimator = "k3",
) -> Tensor:
    """Estimate `KL(policy || reference)` at each action, float32 `[B, A]`, 0 on padding.

    With `r = reference / policy` at an action that the policy sampled: k1 is `-log r` (unbiased,
    sometimes negative), k2 is `(log r)**2 / 2` (low variance, biased), k3 is `r - 1 - log r`
    (unbiased, never negative; used by GRPO). k3 has rare, huge values where the policy is far from
    the reference, which harm a reward but not a loss. "coati" is ColossalAI's formula, k3 with r
    inverted: it penalises similarly, but is no estimate of this divergence.

    Raises:
        ConfigError: The estimator is unknown.
    """
    check_choice("kl_estimator", estimator, get_args(KLEstimator))
    log_r = _log_ratio(reference_log_probs, log_probs, mask)
    if estimator == "k1":
        return -log_r
    if estimator == "k2":
        return 0.5 * log_r.square()
    if estimator == "coati":
        log_r = -log_r
    return log_r.exp() - 1 - log_r


def truncated_importance(
    log_probs: Tensor, maker_log_probs: Tensor, mask: Tensor, *, cap: float
) -> Tensor:
    """Return `min(policy / maker's policy, cap)` at each action, float32 `[B, A]`, 1 on padding.

    Truncated importance sampling: an inference engine rounds otherwise than the trainer, and holds
    older weights. These weights multiply the policy loss, whose ratio is then that of the policy in
    training to `policy`, the trainer's policy before the batch was first trained. No gradient goes
    through them. Sources: Ionides 2008, "Truncated Importance Sampling"; Yao et al. 2025, "Your
    Efficient RL Framework Secretly Brings You Off-Policy RL Training"; verl's
    `rollout_is="token"`, TRL's `vllm_importance_sampling_mode="token_truncate"`.

    Args:
        log_probs: Log-probabilities of the trainer's policy, float32 `[B, A]`.
        maker_log_probs: Log-probabilities that the maker noted, float32 `[B, A]`.
        mask: True where an action counts, bool `[B, A]`.
        cap: Largest weight, > 0.
    """
    return _log_ratio(log_probs, maker_log_probs, mask).exp().clamp(max=cap).detach()


def product(weights: Tensor | None, others: Tensor | None) -> Tensor | None:
    """Return the product of two kinds of weights, of which each may be None."""
    if weights is None or others is None:
        return others if weights is None else weights
    return weights * others


def _log_ratio(above: Tensor, below: Tensor, mask: Tensor) -> Tensor:
    """Return `above - below`, clamped to `MAX_LOG_RATIO`, 0 on padding."""
    # fill both sides first: a nan or infinity on padding would reach the gradient
    above, below = above.masked_fill(~mask, 0.0), below.masked_fill(~mask, 0.0)
    return (above - below).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
