"""`GRPOStep`: a training step with a clipped loss and group-relative advantages, no critic.

Sources: Shao et al. 2024 (GRPO, arXiv:2402.03300), Yu et al. 2025 (DAPO, arXiv:2503.14476).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from redrb.algorithms.aggregation import Aggregation, masked_mean, row_mean
from redrb.algorithms.batches import REFERENCE_LOG_PROBS, TrainingBatch
from redrb.algorithms.gradients import Gradients
from redrb.algorithms.log_probs import entropy
from redrb.algorithms.losses import action_ratio, grpo_loss, kl_estimate
from redrb.algorithms.metrics import length_metrics, of_all_ranks
from redrb.algorithms.optimizer_step import check_not_negative, step_optimizers
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
        truncated_importance: Cap of truncated importance sampling, such as 2: the ratio is then
            taken to the trainer's policy before the batch, and the policy loss is multiplied by
            `redrb.algorithms.truncated_importance`. It costs one forward pass a batch. None: the
            ratio is taken to the maker's log-probabilities.
        micro_batch_size: Most samples in a forward pass; the step is that of the whole batch. None:
            no limit.
        micro_batch_tokens: Most tokens in a forward pass, padding included. None: no limit.
        gradients: How gradients are accumulated and averaged; None: over all ranks if the actor is
            replicated (DistributedDataParallel) or sharded (FSDP2), otherwise in this process.

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
        truncated_importance: float | None = None,
        micro_batch_size: int | None = None,
        micro_batch_tokens: int | None = None,
        gradients: Gradients | None = None,
    ) -> None:
        super().__init__(
            actor,
            algorithm="GRPO",
            clip=clip,
            clip_high=clip_high,
            max_grad_norm=max_grad_norm,
            aggregation=aggregation,
            temperature=temperature,
            truncated_importance=truncated_importance,
            micro_batch_size=micro_batch_size,
            micro_batch_tokens=micro_batch_tokens,
            gradients=gradients,
        )
        check_not_negative(beta=beta)
        self.optimizer, self.beta = optimizer, beta

    def __call__(self, experience: Experience) -> dict[str, float]:
        """Take one optimizer step.

        Returns:
            Metrics before the step, of all ranks; `docs/algorithms.md` has a table: `actor_loss`,
            `entropy`, `approx_kl`, `clip_fraction`, `ratio_mean`, `ratio_max`, `length_mean`,
            `length_max`, `actor_grad_norm` before scaling, with a reference `reference_kl`, and
            `reward` where the batch has one.

        Raises:
            RecordError: A field that GRPO needs is None or has another shape, or a gradient is not
                finite. The optimizer was not stepped.
        """
        self.optimizer.zero_grad()
        whole = self.batch(experience, self.actor)
        batch, of_weights = self.proximal(experience, whole)
        metrics = self.accumulate(self.actor, batch, self.actor_loss)
        norms = step_optimizers(
            {"actor": self.actor},
            (self.optimizer,),
            max_grad_norm=self.max_grad_norm,
            gradients=self.gradients,
        )
        metrics |= of_weights | length_metrics(whole)
        if experience.reward is not None:
            metrics["reward"] = row_mean(whole.field("reward"), whole.totals)
        return of_all_ranks(metrics | norms, self.gradients)

    def actor_loss(self, batch: TrainingBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the actor's loss, float32 `[]`, and its metrics.

        Of a micro-batch these are shares, which add up to the loss and metrics of the whole batch;
        of metrics whose names end with `_max` the largest counts.
        """
        mask, totals = batch.action_mask, batch.totals
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
            policy_weights=batch.policy_weights,
            totals=totals,
        )
        with torch.no_grad():
            ratio = action_ratio(log_probs, batch.old_log_probs, mask)
            mean_entropy = masked_mean(entropy(logits, temperature=self.temperature), mask, totals)
            metrics = {"actor_loss": loss, "entropy": mean_entropy}
            if reference is not None:
                kl = kl_estimate(log_probs, reference, mask)
                metrics["reference_kl"] = masked_mean(kl, mask, totals)
        return loss, metrics | self._ratio_metrics(ratio, batch)
