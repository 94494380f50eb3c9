"""Generalized advantage estimation (Schulman et al. 2016, arXiv:1506.02438) on padded actions."""

from __future__ import annotations

import torch
from torch import Tensor


def token_rewards(reward: Tensor, kl: Tensor, action_mask: Tensor, *, kl_coef: float) -> Tensor:
    """Return the reward of each action, float32 `[B, A]`, 0 on padding.

    Each action costs `kl_coef * kl`; a row's last action earns the sample's reward as well
    (Ziegler et al. 2019, arXiv:1909.08593, equation 2).

    Args:
        reward: Reward of each sample, float32 `[B]`.
        kl: Log-ratio of behaviour to reference policy, float32 `[B, A]`.
        action_mask: True where an action counts, bool `[B, A]`; at least one a row.
        kl_coef: Price of the divergence from the reference.
    """
    rewards = -kl_coef * kl * action_mask
    last = action_mask.long().cumsum(1).argmax(1, keepdim=True)
    return rewards.scatter_add(1, last, reward[:, None])


def gae(
    rewards: Tensor, values: Tensor, action_mask: Tensor, *, gamma: float, lam: float
) -> Tensor:
    """Return the advantage of each action, float32 `[B, A]`, 0 on padding.

    `A_t = delta_t + gamma * lam * A_{t+1}` with `delta_t = r_t + gamma * V_{t+1} - V_t`
    (equations 11 and 16 of the paper); the value after a row's last action is 0, whether it ended
    with EOS or was cut off.

    Args:
        rewards: Reward of each action, float32 `[B, A]`, 0 on padding.
        values: Value of the state before each action, float32 `[B, A]`.
        action_mask: True where an action counts, bool `[B, A]`, without holes within a row.
        gamma: Discount a token.
        lam: GAE's lambda: 0 trusts the critic, 1 the sampled return.
    """
    values = values * action_mask
    advantage = torch.zeros_like(values[:, 0])
    next_value = torch.zeros_like(advantage)
    columns = []
    for step in reversed(range(values.shape[1])):
        delta = rewards[:, step] + gamma * next_value - values[:, step]
        advantage = delta + gamma * lam * advantage
        next_value = values[:, step]
        columns.append(advantage)
    return torch.stack(columns[::-1], 1) * action_mask
