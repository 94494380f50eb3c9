"""What the demo's trainer does with a batch: PPO with the demo's settings."""

from __future__ import annotations

import torch

from redrb.algorithms import PPOStep
from redrb.experience import Experience
from workers.policy import ActorCritic
from workers.settings import PPOSettings


def make_optimizer(actor_critic: ActorCritic, settings: PPOSettings) -> torch.optim.Optimizer:
    """Return Adam over actor and critic, each with its own learning rate."""
    groups = [
        {"params": list(actor_critic.actor.parameters()), "lr": settings.actor_learning_rate},
        {"params": list(actor_critic.critic.parameters()), "lr": settings.critic_learning_rate},
    ]
    return torch.optim.Adam(groups, fused=True)


def ppo_step(
    actor_critic: ActorCritic, optimizer: torch.optim.Optimizer, settings: PPOSettings
) -> PPOStep:
    """Return the step: values learn returns, every action of the batch weighs the same."""
    return PPOStep(
        actor_critic.actor,
        actor_critic.critic,
        optimizer,
        optimizer,
        clip=settings.clip,
        value_clip=settings.value_clip,
        value_target="returns",
        entropy_coef=settings.entropy_coef,
        max_grad_norm=settings.max_grad_norm,
        aggregation="token",
        normalise_advantages=True,
    )


def train_step(
    actor_critic: ActorCritic,
    optimizer: torch.optim.Optimizer,
    experience: Experience,
    *,
    settings: PPOSettings,
) -> dict[str, float]:
    """Take one optimizer step on a batch and return its metrics; see `PPOStep`.

    Raises:
        RecordError: A field that PPO needs is None.
    """
    return ppo_step(actor_critic, optimizer, settings)(experience)
