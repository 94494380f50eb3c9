"""Base of PPO's and GRPO's training steps: the actor's forward pass, its metrics, gradients."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from redrb.algorithms.batches import TrainingBatch
from redrb.algorithms.log_probs import action_log_probs
from redrb.algorithms.losses import masked_mean
from redrb.algorithms.models import action_logits


class PolicyStep:
    """Base of steps that train an actor by the ratio of its policy to the behaviour policy.

    Attributes:
        actor: Policy in training.
        clip: The lower epsilon of the ratio.
        clip_high: The upper epsilon; None: `clip`.
        temperature: Temperature at which the maker sampled.
    """

    actor: nn.Module
    clip: float
    clip_high: float | None
    temperature: float

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss; override it, for instance to scale the loss."""
        loss.backward()  # type: ignore[no-untyped-call]

    def _forward(self, batch: TrainingBatch) -> tuple[Tensor, Tensor]:
        """Return the actor's logits `[B, A, V]` and log-probabilities of the actions `[B, A]`."""
        logits = action_logits(self.actor, batch.sequences, batch.attention_mask, batch.actions)
        log_probs = action_log_probs(
            logits, batch.sequences, batch.actions, temperature=self.temperature
        )
        return logits, log_probs

    @torch.no_grad()
    def _ratio_metrics(self, ratio: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """Return `approx_kl` (k3, behaviour from current) and `clip_fraction`, float32 `[]`."""
        high = self.clip if self.clip_high is None else self.clip_high
        outside = (ratio < 1 - self.clip) | (ratio > 1 + high)
        return {
            "approx_kl": masked_mean(ratio - 1 - ratio.log(), mask),
            "clip_fraction": masked_mean(outside.float(), mask),
        }
