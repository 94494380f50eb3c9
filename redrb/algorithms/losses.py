"""Losses of PPO and GRPO on padded actions, and means over the actions or samples of a batch.

Sources: Schulman et al. 2017 (PPO, arXiv:1707.06347), Shao et al. 2024 (GRPO, arXiv:2402.03300),
Yu et al. 2025 (DAPO, arXiv:2503.14476), and the losses of ColossalAI's `coati`.
In all functions `mask` is True where an action counts, bool `[B, A]`; values elsewhere have no
effect, not even nan. Log-probabilities are of the actions that were taken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Self, TypeAlias, get_args

import torch
from torch import Tensor

from redrb.checks import check_choice
from redrb.errors import ConfigError

Aggregation: TypeAlias = Literal["token", "sequence"]
"""How losses of actions become one number: "token" is the mean over all actions of the batch
(DAPO), so long samples weigh more; "sequence" is the mean over samples of each sample's mean (GRPO,
`coati`)."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Divisors of the means of a whole batch, for a part: parts add up to its means and gradients.

    Attributes:
        actions: Actions that count in the whole batch, a number `[]`.
        samples: Samples with such an action, `[]`.
        rows: All samples, `[]`.
    """

    actions: Tensor
    samples: Tensor
    rows: Tensor

    @classmethod
    def of(cls, mask: Tensor) -> Self:
        """Return the totals of a batch that is trained as a whole."""
        return cls(mask.sum(), mask.any(1).sum(), mask.new_tensor(mask.shape[0], dtype=torch.int64))

    def of_ranks(self, mean: Callable[[Tensor], Tensor]) -> Totals:
        """Return the means over ranks, as of their gradients; `mean` averages numbers `[N]`."""
        counts = torch.stack([self.actions, self.samples, self.rows])
        return Totals(*mean(counts.float()).unbind())


def aggregate(
    losses: Tensor,
    mask: Tensor,
    *,
    aggregation: Aggregation = "token",
    weights: Tensor | None = None,
    totals: Totals | None = None,
) -> Tensor:
    """Return the weighted mean of the losses `[B, A]` where `mask` is True, float32 `[]`.

    Weights multiply the losses without division by their sum, as in importance sampling. Samples
    without an action that counts are left out; if nothing counts, the mean is 0.

    Args:
        losses: Loss of each action, `[B, A]`.
        weights: Importance weight of each sample or action, `[B, 1]` or `[B, A]`.
        totals: Of the whole batch, where this is a part of it: the result is the part's share of
            the mean. None: this is the whole batch.

    Raises:
        ConfigError: The aggregation is unknown.
    """
    check_choice("aggregation", aggregation, get_args(Aggregation))
    totals = totals or Totals.of(mask)
    losses = losses.masked_fill(~mask, 0.0)
    if weights is not None:
        losses = losses * torch.where(mask, weights, 0.0)
    if aggregation == "token":
        return losses.sum() / _divisor(totals.actions)
    rows = losses.sum(1) / mask.sum(1).clamp(min=1)
    return rows.sum() / _divisor(totals.samples)


def masked_mean(values: Tensor, mask: Tensor, totals: Totals | None = None) -> Tensor:
    """Return the mean of the values where `mask` is True, float32 `[]`; 0 if it is nowhere True."""
    return aggregate(values, mask, totals=totals)


def row_mean(values: Tensor, totals: Totals) -> Tensor:
    """Return the mean of numbers of samples `[B]`, or of a part its share of it, float32 `[]`."""
    return values.sum() / _divisor(totals.rows)


def normalised(advantages: Tensor, mask: Tensor) -> Tensor:
    """Return advantages with mean 0 and variance 1 over the actions that count, `[B, A]`.

    Computed in float64: of equal advantages in float32 a rounding error would be left, which the
    division makes large. Equal advantages become 0. The divisor's 1e-8 is that of TRL's and
    OpenAI's `whiten`.
    """
    exact = advantages.double()
    counted = exact[mask]
    if not counted.numel() or bool(counted.min() == counted.max()):
        return torch.zeros_like(advantages)
    variance, mean = torch.var_mean(counted, correction=0)
    return ((exact - mean) / (variance.sqrt() + 1e-8)).to(advantages.dtype)


def _divisor(count: Tensor) -> Tensor:
    """Return a count by which sums can be divided: 1 for none, of which the sums are 0."""
    return torch.where(count > 0, count, torch.ones_like(count))


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
        clip: Epsilon of PPO's equation 7.
        clip_high: The upper epsilon (DAPO's "clip higher", 0.28 there); None: `clip`.
        aggregation, weights, totals: As for `redrb.algorithms.losses.aggregate`.
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
        log_probs, old_log_probs, reference_log_probs: Log-probabilities of the actor in training,
            of the policy that sampled, and of the reference policy, which is needed unless `beta`
            is 0; float32 `[B, A]` each.
        beta: Price of the divergence; the paper has 0.04, DAPO 0.
        policy_weights: Weights of the policy loss alone, not of the divergence, `[B, A]`, such as
            those of `truncated_importance`.
        advantages, clip, clip_high, aggregation, weights, totals: As for `policy_loss`.

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
        log_probs, maker_log_probs: Of the trainer's policy, and as the maker noted them, float32
            `[B, A]`.
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
