"""A trainer's step of GRPO: a clipped loss with group-relative advantages, and no critic.

Sources: Shao et al. 2024 (GRPO, arXiv:2402.03300), Yu et al. 2025 (DAPO, arXiv:2503.14476).
"""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from redrb.algorithms.batches import REFERENCE_LOG_PROBS, TrainingBatch
from redrb.algorithms.log_probs import action_log_probs, entropy
from redrb.algorithms.losses import (
    Aggregation,
    action_ratio,
    check_choice,
    grpo_loss,
    kl_estimate,
    masked_mean,
)
from redrb.algorithms.models import action_logits, device_of
from redrb.algorithms.optimizer_step import (
    as_floats,
    check_not_negative,
    check_positive,
    step_optimizers,
)
from redrb.algorithms.ppo import ratio_metrics
from redrb.experience import Experience


class GRPOStep:
    """One optimizer step on a batch of experience: `metrics = step(experience)`.

    Advantages come with the experience, `[B]` or `[B, A]`: `GRPOExperienceMaker` fills them, so the
    samples of a group may train in different batches. `tensors["importance_weights"]`, `[B]` or
    `[B, A]`, multiply the loss where they are there. The actor is used in the mode that it is in.

    To change a part, subclass it: `actor_loss` and `backward` are its joints.

    Args:
        actor: Policy in training; `redrb.algorithms.models` says how it is called.
        optimizer: Of its parameters.
        clip: The lower epsilon of the ratio, > 0, and the upper one unless `clip_high` is given.
        clip_high: The upper epsilon (DAPO's "clip higher", 0.28 there).
        beta: Price of the divergence from the reference, whose log-probabilities must then be in
            `tensors["reference_log_probs"]`. The paper has 0.04; 0, as in DAPO, needs no reference.
        max_grad_norm: Gradients are scaled down to it; None: never.
        aggregation: How a mean over actions is taken: "token" as DAPO, "sequence" as the paper.
        temperature: At which the maker sampled: it divides the logits here too.

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
            `actor_loss`, `entropy` in nats a token, `approx_kl` of the behaviour from the current
            policy, `clip_fraction`, `actor_grad_norm` before scaling, where there is a reference
            `reference_kl` in nats a token, and the batch's mean `reward`, all before the step.

        Raises:
            RecordError: A field that GRPO needs is None or has another shape, or a gradient is not
                finite. Nothing was stepped.
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
        """Return what the actor minimises, float32 `[]`, and its metrics."""
        mask = batch.action_mask
        advantages = batch.per_action("advantages")
        reference = batch.padded_as_actions(REFERENCE_LOG_PROBS) if self.beta > 0 else None
        logits = action_logits(self.actor, batch.sequences, batch.attention_mask, batch.actions)
        log_probs = action_log_probs(
            logits, batch.sequences, batch.actions, temperature=self.temperature
        )
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
            spread = masked_mean(entropy(logits, temperature=self.temperature), mask)
            metrics = {"actor_loss": loss, "entropy": spread}
            if reference is not None:
                metrics["reference_kl"] = masked_mean(kl_estimate(log_probs, reference, mask), mask)
        metrics |= ratio_metrics(ratio, mask, clip=self.clip, clip_high=self.clip_high)
        return loss, metrics

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss; a strategy of its own (such as scaling) overrides this."""
        loss.backward()  # type: ignore[no-untyped-call]
