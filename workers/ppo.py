"""What a trainer does with a batch: clipped PPO losses and one optimizer step.

Source: Schulman et al. 2017, "Proximal Policy Optimization Algorithms", arXiv:1707.06347.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from redrb.errors import RecordError
from redrb.experience import Experience
from workers.losses import entropy, masked_mean, normalised, policy_loss, value_loss
from workers.policy import ActorCritic, chosen_log_probs
from workers.settings import PPOSettings


@dataclass(frozen=True, eq=False)
class PPOLosses:
    """Losses and measurements of one batch, each float32 `[]`, means over the actions that count.

    Attributes:
        actor_loss: Clipped policy loss, equation 7 of the paper, negated.
        critic_loss: Clipped value loss.
        entropy: Entropy of the current policy in nats a token.
        approx_kl: Divergence of the behaviour from the current policy, in nats a token.
        clip_fraction: Share of actions whose ratio lies outside the clipping range.
    """

    actor_loss: Tensor
    critic_loss: Tensor
    entropy: Tensor
    approx_kl: Tensor
    clip_fraction: Tensor


@dataclass(frozen=True, eq=False)
class _Batch:
    """The fields that PPO needs, none of them None; shapes as in `Experience`."""

    sequences: Tensor
    attention_mask: Tensor
    action_mask: Tensor
    old_log_probs: Tensor
    old_values: Tensor
    advantages: Tensor

    @classmethod
    def of(cls, experience: Experience) -> _Batch:
        """Check and take over the fields; a mask that is None counts everything."""
        sequences = _required(experience.sequences, "sequences")
        log_probs = _required(experience.action_log_probs, "action_log_probs")
        attention_mask, action_mask = experience.attention_mask, experience.action_mask
        return cls(
            sequences=sequences,
            attention_mask=torch.ones_like(sequences) if attention_mask is None else attention_mask,
            action_mask=(
                torch.ones_like(log_probs, dtype=torch.bool) if action_mask is None else action_mask
            ).bool(),
            old_log_probs=log_probs,
            old_values=_required(experience.values, "values"),
            advantages=_required(experience.advantages, "advantages"),
        )


def make_optimizer(actor_critic: ActorCritic, settings: PPOSettings) -> torch.optim.Optimizer:
    """Return Adam over actor and critic, each with its own learning rate."""
    groups = [
        {"params": list(actor_critic.actor.parameters()), "lr": settings.actor_learning_rate},
        {"params": list(actor_critic.critic.parameters()), "lr": settings.critic_learning_rate},
    ]
    return torch.optim.Adam(groups, fused=True)


def train_step(
    actor_critic: ActorCritic,
    optimizer: torch.optim.Optimizer,
    experience: Experience,
    *,
    settings: PPOSettings,
) -> dict[str, float]:
    """Take one optimizer step on a batch.

    Returns:
        `actor_loss`, `critic_loss`, `entropy`, `approx_kl`, `clip_fraction`, the gradients' norms
        before scaling `actor_grad_norm` and `critic_grad_norm`, and the batch's mean `reward`.

    Raises:
        RecordError: A field that PPO needs is None.
    """
    losses = ppo_losses(actor_critic, experience, settings=settings)
    optimizer.zero_grad()
    total = losses.actor_loss - settings.entropy_coef * losses.entropy + losses.critic_loss
    total.backward()  # type: ignore[no-untyped-call]
    actor_norm = clip_grad_norm_(actor_critic.actor.parameters(), settings.max_grad_norm)
    critic_norm = clip_grad_norm_(actor_critic.critic.parameters(), settings.max_grad_norm)
    optimizer.step()
    return {
        "actor_loss": losses.actor_loss.item(),
        "critic_loss": losses.critic_loss.item(),
        "entropy": losses.entropy.item(),
        "approx_kl": losses.approx_kl.item(),
        "clip_fraction": losses.clip_fraction.item(),
        "actor_grad_norm": actor_norm.item(),
        "critic_grad_norm": critic_norm.item(),
        "reward": _required(experience.reward, "reward").mean().item(),
    }


def ppo_losses(
    actor_critic: ActorCritic, experience: Experience, *, settings: PPOSettings
) -> PPOLosses:
    """Return the losses of a batch, however its rows were padded.

    The ratio is taken to the noted `action_log_probs`, so experience of an older policy is treated
    as such. Advantages are normalised over the batch's actions. Values are trained towards the
    returns `advantages + values` (ColossalAI `coati` trains them towards the reward).

    Raises:
        RecordError: A field that PPO needs is None.
    """
    batch = _Batch.of(experience)
    mask = batch.action_mask
    shape = (batch.sequences, batch.attention_mask, mask.shape[1])
    logits = actor_critic.actor(*shape)
    log_probs = chosen_log_probs(logits, batch.sequences)
    log_ratio = (log_probs - batch.old_log_probs).masked_fill(~mask, 0.0)
    advantages = normalised(batch.advantages, mask)
    ratio = log_ratio.exp()
    return PPOLosses(
        actor_loss=policy_loss(ratio, advantages, mask, clip=settings.clip),
        critic_loss=value_loss(
            actor_critic.critic(*shape),
            batch.old_values,
            batch.advantages + batch.old_values,
            mask,
            clip=settings.value_clip,
        ),
        entropy=masked_mean(entropy(logits), mask),
        approx_kl=masked_mean(ratio - 1 - log_ratio, mask).detach(),
        clip_fraction=masked_mean(((ratio - 1).abs() > settings.clip).float(), mask),
    )


def _required(field: Tensor | None, name: str) -> Tensor:
    """Return the field, or raise RecordError where it is None."""
    if field is None:
        raise RecordError(f"PPO needs {name}: the maker has to fill it.", field=name)
    return field
