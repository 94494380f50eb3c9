"""`PPOStep`: a training step with clipped losses of actor and critic.

Source: Schulman et al. 2017, "Proximal Policy Optimization Algorithms", arXiv:1707.06347; the
defaults are those of ColossalAI's `coati`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from redrb.algorithms.aggregation import (
    Aggregation,
    check_choice,
    masked_mean,
    normalised,
    row_mean,
)
from redrb.algorithms.batches import TrainingBatch
from redrb.algorithms.gradients import Gradients
from redrb.algorithms.log_probs import entropy
from redrb.algorithms.losses import action_ratio, policy_loss, product, value_loss
from redrb.algorithms.metrics import length_metrics, of_all_ranks
from redrb.algorithms.models import action_values
from redrb.algorithms.optimizer_step import check_not_negative, check_positive, step_optimizers
from redrb.algorithms.policy_step import PolicyStep
from redrb.errors import RecordError
from redrb.experience import Experience

ValueTarget: TypeAlias = Literal["reward", "returns"]
"""Target of the values: "reward" of the sample (`coati`), or "returns", which are `advantages +
values` as the maker noted them. With advantages of `reward - value` both are the same."""


class PPOStep(PolicyStep):
    """One optimizer step on a batch of experience: `metrics = step(experience)`.

    The ratio is taken to the noted `action_log_probs`, so experience of an older policy is
    corrected. `tensors["importance_weights"]`, `[B]` or `[B, A]`, multiply both losses if present.
    The networks stay in their training or eval mode. Subclasses override `actor_loss`,
    `critic_loss` and `backward`.

    Args:
        actor: Policy in training; `redrb.algorithms.models` says how it is called.
        critic: Value function in training.
        actor_optimizer: Optimizer of the actor's parameters.
        critic_optimizer: Optimizer of the critic's parameters; it may be the same object.
        clip: PPO's epsilon, > 0.
        clip_high: The upper epsilon; None: `clip`.
        value_clip: How far a value may move from the value that the maker noted; None: no limit.
        value_target: Target of the values.
        entropy_coef: Weight of the entropy bonus. Unless it is 0, all logits are copied to float32.
        max_grad_norm: Largest gradient norm of actor and of critic; None: no limit.
        aggregation: How losses of actions become one number.
        normalise_advantages: Give advantages mean 0 and variance 1 over the batch's actions, on
            each rank over those of its own batch.
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
        critic: nn.Module,
        actor_optimizer: Optimizer,
        critic_optimizer: Optimizer,
        *,
        clip: float = 0.2,
        clip_high: float | None = None,
        value_clip: float | None = 0.4,
        value_target: ValueTarget = "reward",
        entropy_coef: float = 0.0,
        max_grad_norm: float | None = 1.0,
        aggregation: Aggregation = "sequence",
        normalise_advantages: bool = False,
        temperature: float = 1.0,
        truncated_importance: float | None = None,
        micro_batch_size: int | None = None,
        micro_batch_tokens: int | None = None,
        gradients: Gradients | None = None,
    ) -> None:
        super().__init__(
            actor,
            algorithm="PPO",
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
        check_positive(value_clip=value_clip)
        check_not_negative(entropy_coef=entropy_coef)
        check_choice("value_target", value_target, get_args(ValueTarget))
        self.critic = critic
        self.actor_optimizer, self.critic_optimizer = actor_optimizer, critic_optimizer
        self.value_clip, self.entropy_coef = value_clip, entropy_coef
        self.value_target: ValueTarget = value_target
        self.normalise_advantages = normalise_advantages

    def __call__(self, experience: Experience) -> dict[str, float]:
        """Take one step of both optimizers.

        Returns:
            Metrics before the step, of all ranks; `docs/algorithms.md` has a table: `actor_loss`,
            `critic_loss`, `entropy`, `approx_kl`, `clip_fraction`, `ratio_mean`, `ratio_max`,
            `length_mean`, `length_max`, `reward`, `reference_kl` where the batch has `kl`, and the
            norms `actor_grad_norm` and `critic_grad_norm` before scaling.

        Raises:
            RecordError: A field that PPO needs is None or has another shape, or a gradient is not
                finite. Nothing was stepped.
        """
        self.actor_optimizer.zero_grad()
        self.critic_optimizer.zero_grad()
        whole = self.batch(experience, self.actor)
        batch, metrics = self.proximal(experience, whole)
        # one network after the other, so that memory holds the activations of one only
        metrics |= self.accumulate(self.actor, batch, self.actor_loss)
        of_critic = self.batch(experience, self.critic)
        metrics |= self.accumulate(self.critic, of_critic, self.critic_loss)
        norms = step_optimizers(
            {"actor": self.actor, "critic": self.critic},
            (self.actor_optimizer, self.critic_optimizer),
            max_grad_norm=self.max_grad_norm,
            gradients=self.gradients,
        )
        metrics |= length_metrics(whole)
        metrics["reward"] = row_mean(whole.field("reward"), whole.totals)
        if experience.kl is not None:
            kl = whole.per_action("kl")
            metrics["reference_kl"] = masked_mean(kl, whole.action_mask, whole.totals)
        return of_all_ranks(metrics | norms, self.gradients)

    def actor_loss(self, batch: TrainingBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the actor's loss, float32 `[]`, and its metrics.

        Of a micro-batch these are shares, which add up to the loss and metrics of the whole batch;
        of metrics whose names end with `_max` the largest counts.
        """
        mask, totals = batch.action_mask, batch.totals
        advantages = self._advantages(batch)
        logits, log_probs = self._forward(batch)
        ratio = action_ratio(log_probs, batch.old_log_probs, mask)
        loss = policy_loss(
            ratio,
            advantages,
            mask,
            clip=self.clip,
            clip_high=self.clip_high,
            aggregation=self.aggregation,
            weights=product(batch.weights, batch.policy_weights),
            totals=totals,
        )
        with torch.set_grad_enabled(self.entropy_coef > 0 and torch.is_grad_enabled()):
            mean_entropy = masked_mean(entropy(logits, temperature=self.temperature), mask, totals)
        metrics = {"actor_loss": loss, "entropy": mean_entropy}
        metrics |= self._ratio_metrics(ratio, batch)
        return (loss - self.entropy_coef * mean_entropy if self.entropy_coef else loss), metrics

    def _advantages(self, batch: TrainingBatch) -> Tensor:
        """Return the advantages `[B, A]`, normalised over the whole batch if that is asked for."""
        if not self.normalise_advantages:
            return batch.per_action("advantages")
        whole = batch if batch.place is None else batch.place.whole
        scaled = normalised(whole.per_action("advantages"), whole.action_mask)
        return scaled if batch.place is None else batch.place.of(scaled)

    def critic_loss(self, batch: TrainingBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the critic's loss, float32 `[]`, and its metrics; see `actor_loss`."""
        old_values, reward = batch.field("values"), batch.field("reward")
        values = action_values(
            self.critic,
            batch.sequences,
            batch.attention_mask,
            batch.actions,
            inputs=batch.inputs,
        )
        if values.shape != old_values.shape:
            raise RecordError(
                f"the critic's values have shape {list(values.shape)}, the batch's values "
                f"{list(old_values.shape)}: maker and trainer need the same critic.",
                field="values",
            )
        targets = reward if values.dim() == 1 else reward[:, None].expand_as(values)
        if self.value_target == "returns":
            targets = self._returns(batch, old_values)
        mask, weights, totals = batch.action_mask, batch.weights, batch.totals
        if values.dim() == 1:
            totals = replace(totals, actions=totals.samples)
            if weights is not None and weights.shape[1] > 1:
                weights = (weights * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(1)
            mask = mask.any(1)[:, None]
            values, old_values, targets = values[:, None], old_values[:, None], targets[:, None]
        loss = value_loss(
            values,
            old_values,
            targets,
            mask,
            clip=self.value_clip,
            aggregation=self.aggregation,
            weights=weights,
            totals=totals,
        )
        return loss, {"critic_loss": loss}

    def _returns(self, batch: TrainingBatch, old_values: Tensor) -> Tensor:
        advantages = batch.field("advantages")
        if old_values.dim() == 2 and advantages.dim() == 1:
            advantages = batch.per_action("advantages")
        if advantages.shape != old_values.shape:
            raise RecordError(
                f"advantages have shape {list(advantages.shape)} and values "
                f"{list(old_values.shape)}: returns are their sum, so both need the same shape; or "
                'set value_target="reward".',
                field="advantages",
            )
        return advantages + old_values
