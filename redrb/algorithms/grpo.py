"""`GRPOStep`: a training step with a clipped loss and group-relative advantages, no critic.

Sources: Shao et al. 2024 (GRPO, arXiv:2402.03300), Yu et al. 2025 (DAPO, arXiv:2503.14476).
"""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from redrb.algorithms.batches import REFERENCE_LOG_PROBS, TrainingBatch
from redrb.algorithms.log_probs import entropy
from redrb.algorithms.losses import (
    Aggregation,
    action_ratio,
    check_choice,
    grpo_loss,
    kl_estimate,
    masked_mean,
)
from redrb.algorithms.models import device_of
from redrb.algorithms.optimizer_step import (
    as_floats,
    check_not_negative,
    check_positive,
    step_optimizers,
)
from redrb.algorithms.policy_step import PolicyStep
from redrb.experience import Experience


class GRPOStep(PolicyStep):
    """One optimizer step on a batch of experience: `metrics = step(experience)`.

    Advantages come with the experience, `[B]` or `[B, A]`: `GRPOExperienceMaker` fills them, so the
    samples of a group may be in different batches. `tensors["importance_weights"]`, `[B]` or
    `[B, A]`, multiply the loss if present. The actor stays in its training or eval mode. Subclasses
    override `actor_loss` and `backward`.

    Args:
        actor: Policy in training; `redrb.algorithms.models` says how it is called.
        optimizer: Optimizer of the actor's parameters.
        clip: The lower epsilon of the ratio, > 0.
        clip_high: The upper epsilon (DAPO's "clip higher", 0.28 there); None: `clip`.
        beta: Price of the divergence from the reference policy. Above 0 the batch needs
            `tensors["reference_log_probs"]`. The paper has 0.04, DAPO 0.
        max_grad_norm: Largest gradient norm; None: no limit.
        aggregation: How losses of actions become one number: "token" in DAPO, "sequence" in the
            paper.
        temperature: Temperature at which the maker sampled; divides the logits.

    Raises:
        ConfigError: An option is out of range.
    """

    def __init__(
        self,
        actor: nn.Module,
        optimizer: Optimizer,
        *,
        clip: float = 0.2,
        clip_high: float | None = None,
        beta: float = 0.0,
        max_grad_norm: float | None = 1.0,
        aggregation: Aggregation = "token",
        temperature: float = 1.0,
    ) -> None:
        check_positive(
            clip=clip, clip_high=clip_high, max_grad_norm=max_grad_norm, temperature=temperature
        )
        check_not_negative(beta=beta)
        check_choice("aggregation", aggregation, get_args(Aggregation))
        self.actor, self.optimizer = actor, optimizer
        self.clip, self.clip_high, self.beta = clip, clip_high, beta
        self.max_grad_norm, self.temperature = max_grad_norm, temperature
        self.aggregation: Aggregation = aggregation

    def __call__(self, experience: Experience) -> dict[str, float]:
        """Take one optimizer step.

        Returns:
            Values before the step: `actor_loss`, `entropy` in nats a token, `approx_kl` of the
            behaviour from the current policy, `clip_fraction`, `actor_grad_norm` before scaling,
            with a reference `reference_kl` in nats a token, and the mean `reward`.

        Raises:
            RecordError: A field that GRPO needs is None or has another shape, or a gradient is not
                finite. The optimizer was not stepped.
        """
        self.optimizer.zero_grad()
        batch = TrainingBatch.of(experience, algorithm="GRPO", device=device_of(self.actor))
        loss, metrics = self.actor_loss(batch)
        self.backward(loss)
        norms = step_optimizers(
            {"actor": self.actor}, (self.optimizer,), max_grad_norm=self.max_grad_norm
        )
        if experience.reward is not None:
            metrics["reward"] = batch.field("reward").mean()
        return as_floats({**metrics, **norms})

    def actor_loss(self, batch: TrainingBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the actor's loss, float32 `[]`, and its metrics."""
        mask = batch.action_mask
        advantages = batch.per_action("advantages")
        reference = batch.padded_as_actions(REFERENCE_LOG_PROBS) if self.beta > 0 else None
        logits, log_probs = self._forward(batch)
        loss = grpo_loss(
            log_probs,
            batch.old_log_probs,
            advantages,
            mask,
            clip=self.clip,
            clip_high=self.clip_high,
            beta=self.beta,
            reference_log_probs=reference,
            aggregation=self.aggregation,
            weights=batch.weights,
        )
        with torch.no_grad():
            ratio = action_ratio(log_probs, batch.old_log_probs, mask)
            mean_entropy = masked_mean(entropy(logits, temperature=self.temperature), mask)
            metrics = {"actor_loss": loss, "entropy": mean_entropy}
            if reference is not None:
                metrics["reference_kl"] = masked_mean(kl_estimate(log_probs, reference, mask), mask)
        return loss, metrics | self._ratio_metrics(ratio, mask)
