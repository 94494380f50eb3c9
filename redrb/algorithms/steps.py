"""Training steps: `PPOStep` with clipped losses of actor and critic, `GRPOStep` without a critic.

Sources: Schulman et al. 2017, "Proximal Policy Optimization Algorithms", arXiv:1707.06347, with the
defaults of ColossalAI's `coati`; Shao et al. 2024 (GRPO, arXiv:2402.03300); Yu et al. 2025 (DAPO,
arXiv:2503.14476).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, TypeAlias, get_args

from torch import Tensor, nn
from torch.optim import Optimizer

from redrb.algorithms.advantages import AdvantageMethod, advantages_of_groups
from redrb.algorithms.batches import TrainingBatch
from redrb.algorithms.losses import (
    Aggregation,
    masked_mean,
    row_mean,
    value_loss,
)
from redrb.algorithms.models import action_values
from redrb.algorithms.policy_step import (
    PolicyStep,
    check_not_negative,
    check_positive,
)
from redrb.checks import check_choice
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
        value_clip: How far a value may move from the value that the maker noted; None: no limit.
        value_target: Target of the values.
        entropy_coef: Weight of the entropy bonus. Unless it is 0, all logits are copied to float32.
        aggregation: How losses of actions become one number.
        policy_options: Options of `redrb.algorithms.policy_step.PolicyStep`, such as `clip` and
            `micro_batch_tokens`.

    Raises:
        ConfigError: An option is out of range.
    """

    algorithm = "PPO"

    def __init__(
        self,
        actor: nn.Module,
        critic: nn.Module,
        actor_optimizer: Optimizer,
        critic_optimizer: Optimizer,
        *,
        value_clip: float | None = 0.4,
        value_target: ValueTarget = "reward",
        entropy_coef: float = 0.0,
        aggregation: Aggregation = "sequence",
        **policy_options: Any,
    ) -> None:
        super().__init__(actor, aggregation=aggregation, **policy_options)
        check_positive(value_clip=value_clip)
        check_not_negative(entropy_coef=entropy_coef)
        check_choice("value_target", value_target, get_args(ValueTarget))
        self.critic = critic
        self.actor_optimizer, self.critic_optimizer = actor_optimizer, critic_optimizer
        self.value_clip, self.entropy_coef = value_clip, entropy_coef
        self.value_target: ValueTarget = value_target

    def __call__(self, experience: Experience) -> dict[str, float]:
        """Take one step of both optimizers.

        Returns:
            Metrics before the step, of all ranks; `docs/reference/algorithms.md` has a table:
            `actor_loss`, `critic_loss`, `entropy`, `approx_kl`, `clip_fraction`, `ratio_mean`,
            `ratio_max`, `length_mean`, `length_max`, `reward`, `reference_kl` where the batch has
            `kl`, and the norms `actor_grad_norm` and `critic_grad_norm` before scaling.

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
        metrics["reward"] = row_mean(whole.field("reward"), whole.totals)
        if experience.kl is not None:
            kl = whole.per_action("kl")
            metrics["reference_kl"] = masked_mean(kl, whole.action_mask, whole.totals)
        networks = {"actor": self.actor, "critic": self.critic}
        return self._end(whole, metrics, networks, (self.actor_optimizer, self.critic_optimizer))

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
            advantages = batch.field("advantages")
            if old_values.dim() == 2 and advantages.dim() == 1:
                advantages = batch.per_action("advantages")
            if advantages.shape != old_values.shape:
                raise RecordError(
                    f"advantages have shape {list(advantages.shape)} and values "
                    f"{list(old_values.shape)}: returns are their sum, so both need the same "
                    'shape; or set value_target="reward".',
                    field="advantages",
                )
            targets = advantages + old_values
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


class GRPOStep(PolicyStep):
    """One optimizer step on a batch of experience: `metrics = step(experience)`.

    Advantages come with the experience, `[B]` or `[B, A]`: `GRPOExperienceMaker` fills them, so the
    samples of a group may be in different batches. Where they are None, such as in the samples of
    agents, the rewards of each group are compared here: the batch must hold whole groups, as every
    take returns them, and the samples of one session count once. `tensors["importance_weights"]`,
    `[B]` or `[B, A]`, multiply the loss if present. The actor stays in its training or eval mode.
    Subclasses override `actor_loss` and `backward`.

    Args:
        actor: Policy in training; `redrb.algorithms.models` says how it is called.
        optimizer: Optimizer of the actor's parameters.
        beta: Price of the divergence from the reference policy. Above 0 the batch needs
            `tensors["reference_log_probs"]`. The paper has 0.04, DAPO 0.
        aggregation: How losses of actions become one number: "token" in DAPO, "sequence" in the
            paper.
        scale_by_std, method: How rewards without advantages are compared; see
            `redrb.algorithms.group_relative_advantages`.
        policy_options: Options of `redrb.algorithms.policy_step.PolicyStep`, such as `clip` and
            `micro_batch_tokens`.

    Raises:
        ConfigError: An option is out of range.
    """

    algorithm = "GRPO"

    def __init__(
        self,
        actor: nn.Module,
        optimizer: Optimizer,
        *,
        beta: float = 0.0,
        aggregation: Aggregation = "token",
        scale_by_std: bool = True,
        method: AdvantageMethod = "grpo",
        **policy_options: Any,
    ) -> None:
        super().__init__(actor, aggregation=aggregation, **policy_options)
        check_not_negative(beta=beta)
        check_choice("method", method, get_args(AdvantageMethod))
        self.optimizer, self.beta = optimizer, beta
        self.scale_by_std, self.method = scale_by_std, method

    def __call__(self, experience: Experience) -> dict[str, float]:
        """Take one optimizer step.

        Returns:
            Metrics before the step, of all ranks; `docs/reference/algorithms.md` has a table:
            `actor_loss`, `entropy`, `approx_kl`, `clip_fraction`, `ratio_mean`, `ratio_max`,
            `length_mean`, `length_max`, `actor_grad_norm` before scaling, with a reference
            `reference_kl`, and `reward` where the batch has one.

        Raises:
            RecordError: A field that GRPO needs is None or has another shape, or a gradient is not
                finite. The optimizer was not stepped.
        """
        self.optimizer.zero_grad()
        if experience.advantages is None:
            found = advantages_of_groups(
                experience, scale_by_std=self.scale_by_std, method=self.method
            )
            experience = replace(experience, advantages=found)
        whole = self.batch(experience, self.actor)
        batch, metrics = self.proximal(experience, whole)
        metrics |= self.accumulate(self.actor, batch, self.actor_loss)
        if experience.reward is not None:
            metrics["reward"] = row_mean(whole.field("reward"), whole.totals)
        return self._end(whole, metrics, {"actor": self.actor}, (self.optimizer,))
