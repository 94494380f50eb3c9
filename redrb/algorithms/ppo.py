"""`PPOStep`: a training step with clipped losses of actor and critic.

Source: Schulman et al. 2017, "Proximal Policy Optimization Algorithms", arXiv:1707.06347; the
defaults are those of ColossalAI's `coati`.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from redrb.algorithms.batches import TrainingBatch
from redrb.algorithms.log_probs import entropy
from redrb.algorithms.losses import (
    Aggregation,
    action_ratio,
    check_choice,
    masked_mean,
    normalised,
    policy_loss,
    value_loss,
)
from redrb.algorithms.models import action_values, device_of
from redrb.algorithms.optimizer_step import (
    as_floats,
    check_not_negative,
    check_positive,
    step_optimizers,
)
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
        normalise_advantages: Give advantages mean 0 and variance 1 over the batch's actions.
        temperature: Temperature at which the maker sampled; divides the logits.

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
    ) -> None:
        check_positive(
            clip=clip,
            clip_high=clip_high,
            value_clip=value_clip,
            max_grad_norm=max_grad_norm,
            temperature=temperature,
        )
        check_not_negative(entropy_coef=entropy_coef)
        check_choice("value_target", value_target, get_args(ValueTarget))
        check_choice("aggregation", aggregation, get_args(Aggregation))
        self.actor, self.critic = actor, critic
        self.actor_optimizer, self.critic_optimizer = actor_optimizer, critic_optimizer
        self.clip, self.clip_high, self.value_clip = clip, clip_high, value_clip
        self.value_target: ValueTarget = value_target
        self.entropy_coef, self.max_grad_norm = entropy_coef, max_grad_norm
        self.aggregation: Aggregation = aggregation
        self.normalise_advantages, self.temperature = normalise_advantages, temperature

    def __call__(self, experience: Experience) -> dict[str, float]:
        """Take one step of both optimizers.

        Returns:
            `actor_loss`, `critic_loss`, `entropy` in nats a token, `approx_kl` of the behaviour
            from the current policy, `clip_fraction`, the norms `actor_grad_norm` and
            `critic_grad_norm` before scaling, and the batch's mean `reward`, all before the step.

        Raises:
            RecordError: A field that PPO needs is None or has another shape, or a gradient is not
                finite. Nothing was stepped.
        """
        self.actor_optimizer.zero_grad()
        self.critic_optimizer.zero_grad()
        # one network after the other, so that memory holds the activations of one only
        actor_loss, metrics = self.actor_loss(self.batch(experience, self.actor))
        self.backward(actor_loss)
        critic_loss, critic_metrics = self.critic_loss(self.batch(experience, self.critic))
        self.backward(critic_loss)
        norms = step_optimizers(
            {"actor": self.actor, "critic": self.critic},
            (self.actor_optimizer, self.critic_optimizer),
            max_grad_norm=self.max_grad_norm,
        )
        return as_floats({**metrics, **critic_metrics, **norms})

    def batch(self, experience: Experience, network: nn.Module) -> TrainingBatch:
        """Return the batch on the network's device."""
        return TrainingBatch.of(experience, algorithm="PPO", device=device_of(network))

    def actor_loss(self, batch: TrainingBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the actor's loss, float32 `[]`, and its metrics."""
        mask = batch.action_mask
        advantages = batch.per_action("advantages")
        if self.normalise_advantages:
            advantages = normalised(advantages, mask)
        logits, log_probs = self._forward(batch)
        ratio = action_ratio(log_probs, batch.old_log_probs, mask)
        loss = policy_loss(
            ratio,
            advantages,
            mask,
            clip=self.clip,
            clip_high=self.clip_high,
            aggregation=self.aggregation,
            weights=batch.weights,
        )
        with torch.set_grad_enabled(self.entropy_coef > 0 and torch.is_grad_enabled()):
            mean_entropy = masked_mean(entropy(logits, temperature=self.temperature), mask)
        metrics = {"actor_loss": loss, "entropy": mean_entropy}
        metrics |= self._ratio_metrics(ratio, mask)
        return (loss - self.entropy_coef * mean_entropy if self.entropy_coef else loss), metrics

    def critic_loss(self, batch: TrainingBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the critic's loss, float32 `[]`, and its metrics."""
        old_values, reward = batch.field("values"), batch.field("reward")
        values = action_values(self.critic, batch.sequences, batch.attention_mask, batch.actions)
        if values.shape != old_values.shape:
            raise RecordError(
                f"the critic's values have shape {list(values.shape)}, the batch's values "
                f"{list(old_values.shape)}: maker and trainer need the same critic.",
                field="values",
            )
        targets = reward if values.dim() == 1 else reward[:, None].expand_as(values)
        if self.value_target == "returns":
            targets = self._returns(batch, old_values)
        mask, weights = batch.action_mask, batch.weights
        if values.dim() == 1:
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
        )
        return loss, {"critic_loss": loss, "reward": reward.mean()}

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
