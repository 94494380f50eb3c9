"""Rewards less the price of the divergence, and advantages: GAE, or relative to a group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from redrb.checks import check_choice
from redrb.errors import ConfigError, RecordError
from redrb.experience import Experience
from redrb.experience.fields import SESSION
from redrb.experience.records import per_sample
from redrb.words import counted

AdvantageMethod: TypeAlias = Literal["grpo", "rloo", "reinforce++"]
"""How a sample is compared with its group; see `group_relative_advantages`."""

STD_EPSILON = 1e-4
"""Added to a group's standard deviation, as in TRL: nearly equal rewards give small advantages."""


@dataclass(frozen=True, kw_only=True)
class GAE:
    """Settings of generalized advantage estimation.

    Attributes:
        gamma: Discount of the next token, 0 to 1.
        lam: GAE's lambda, 0 to 1: 0 trusts the critic, 1 the sampled return.
    """

    gamma: float = 1.0
    lam: float = 0.95

    def __post_init__(self) -> None:
        for name in ("gamma", "lam"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} {getattr(self, name)} is not within 0 and 1.")


@dataclass(frozen=True, kw_only=True)
class Overlong:
    """DAPO's punishment of long completions (Yu et al. 2025, arXiv:2503.14476, equation 13).

    Attributes:
        limit: Tokens at which a completion is cut off, the paper's L_max.
        cache: Tokens before the limit over which the punishment grows, 1 to `limit`; L_cache.
        most: Punishment at the limit, in rewards, > 0; 1 in the paper.
    """

    limit: int
    cache: int
    most: float = 1.0

    def __post_init__(self) -> None:
        if not (1 <= self.cache <= self.limit and 0 < self.most < float("inf")):
            raise ConfigError(f"{self}: cache must be 1 to limit, and most above 0 and finite.")

    def __call__(self, lengths: Tensor) -> Tensor:
        """Return what is added to the reward of each completion, float32 `[B]`, at most 0.

        Args:
            lengths: Tokens of each completion, int64 `[B]`.
        """
        return self.most * ((self.limit - self.cache - lengths) / self.cache).clamp(-1, 0)


def compute_reward(reward: Tensor, kl: Tensor, action_mask: Tensor, *, kl_coef: float) -> Tensor:
    """Return `reward - kl_coef * mean kl` of each sample, float32 `[B]`, as in `coati`.

    Args:
        reward: float32 `[B]`.
        kl: Divergence from the reference at each action, float32 `[B, A]`.
        action_mask: True where an action counts, bool `[B, A]`.
        kl_coef: Price of the divergence, in rewards a nat.
    """
    mean_kl = kl.masked_fill(~action_mask, 0.0).sum(1) / action_mask.sum(1).clamp(min=1)
    return reward - kl_coef * mean_kl


def token_rewards(reward: Tensor, kl: Tensor, action_mask: Tensor, *, kl_coef: float) -> Tensor:
    """Return the reward of each action, float32 `[B, A]`, 0 on padding.

    Each action costs `kl_coef * kl`; a row's last action also gets the sample's reward
    (Ziegler et al. 2019, arXiv:1909.08593, equation 2).

    Args:
        kl: Log-ratio of behaviour to reference policy, float32 `[B, A]`.
        reward, action_mask, kl_coef: As for `compute_reward`; at least one action a row.
    """
    rewards = -kl_coef * kl * action_mask
    last = action_mask.long().cumsum(1).argmax(1, keepdim=True)
    return rewards.scatter_add(1, last, reward[:, None])


def gae(
    rewards: Tensor, values: Tensor, action_mask: Tensor, *, gamma: float, lam: float
) -> Tensor:
    """Return the advantage of each action, float32 `[B, A]`, 0 on padding.

    `A_t = delta_t + gamma * lam * A_{t+1}` with `delta_t = r_t + gamma * V_{t+1} - V_t`
    (Schulman et al. 2016, arXiv:1506.02438, equations 11 and 16); the value after a row's last
    action is 0, whether it ended with EOS or was cut off.

    Args:
        rewards: Reward of each action, float32 `[B, A]`, 0 on padding.
        values: Value of the state before each action, float32 `[B, A]`.
        action_mask: True where an action counts, bool `[B, A]`, without holes within a row.
        gamma, lam: As for `GAE`.
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


def group_relative_advantages(
    reward: Tensor,
    *,
    group_size: int | None = None,
    group_index: Tensor | None = None,
    scale_by_std: bool = True,
    method: AdvantageMethod = "grpo",
) -> Tensor:
    """Return the advantage of each sample over its group, float32 `[B]`.

    "grpo": `(reward - mean) / (std + 1e-4)` over the samples of one prompt (Shao et al. 2024,
    arXiv:2402.03300, section 4.1.2), with the sample standard deviation (n - 1), as in verl and
    TRL. "rloo": the reward less the mean of the n - 1 other samples, `(reward - mean) * n / (n -
    1)` (Ahmadian et al. 2024, arXiv:2402.14740). "reinforce++": `reward - mean`, and of
    a group of one the reward (Hu et al. 2025, arXiv:2501.03262); the training step then normalises
    over its batch, with `normalise_advantages=True`.

    A group with equal rewards has advantages of 0, exactly, and so has a group of one sample but
    with "reinforce++". Means are taken in float64: that of equal rewards in float32 differs from
    them by a rounding error.

    Args:
        reward: Reward of each sample, float32 `[B]`.
        group_size: Samples in each group; the samples of a group are neighbours.
        group_index: Instead of `group_size`: the index of each sample's group, int64 `[B]`, such as
            `Experience.group_index`.
        scale_by_std: False leaves out the division (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783),
            because it gives prompts that are nearly always or never solved more weight. Only "grpo"
            divides.
        method: How a sample is compared with its group.

    Raises:
        ConfigError: Not exactly one of `group_size` and `group_index` is given, or the method is
            unknown.
        RecordError: The samples are no whole groups.
    """
    check_choice("method", method, get_args(AdvantageMethod))
    if (group_size is None) == (group_index is None):
        raise ConfigError("give either group_size or group_index.")
    if group_index is not None:
        if group_index.shape != reward.shape:
            raise RecordError(
                f"group_index has shape {list(group_index.shape)}, reward {list(reward.shape)}.",
                field="group_index",
            )
        known, groups = torch.unique(group_index.to(reward.device), return_inverse=True)
        count = len(known)
    else:
        size, samples = group_size or 0, len(reward)
        if size < 1 or samples % size:
            raise RecordError(
                f"{counted(samples, 'sample', 'are')} no whole groups of {group_size}.",
                field="reward",
            )
        groups, count = torch.arange(samples, device=reward.device) // size, samples // size
    exact = reward.double()
    zeros = exact.new_zeros(count)
    sizes = zeros.index_add(0, groups, torch.ones_like(exact))
    mean = zeros.index_add(0, groups, exact) / sizes
    largest, smallest = (
        zeros.scatter_reduce(0, groups, exact, how, include_self=False) for how in ("amax", "amin")
    )
    differ = (largest != smallest)[groups]
    advantages = torch.where(differ, exact - mean[groups], 0.0)
    if method == "reinforce++":
        advantages = torch.where(sizes[groups] > 1, advantages, exact)
    elif method == "rloo":
        advantages = advantages * (sizes / (sizes - 1).clamp(min=1))[groups]
    elif scale_by_std:
        variance = zeros.index_add(0, groups, advantages.square()) / (sizes - 1).clamp(min=1)
        advantages = advantages / (variance.sqrt()[groups] + STD_EPSILON)
    return advantages.float()


def advantages_of_groups(
    experience: Experience,
    *,
    scale_by_std: bool = True,
    method: AdvantageMethod = "grpo",
) -> Tensor:
    """Return the advantage of each sample of a batch over its group, float32 `[B]`.

    The batch holds whole groups, as every take returns them. Samples of a group with the same
    `extras["redrb_session"]`, which gateways set, and the same reward count once in the mean and
    the standard deviation of their group, however many branches an agent's session has; each of
    them gets that advantage.

    Args:
        scale_by_std, method: Of `group_relative_advantages`.

    Raises:
        RecordError: The batch has not one reward a sample, or was not made of groups.
    """
    size, reward, index = len(experience), experience.reward, experience.group_index
    if reward is None or reward.numel() != size or index is None:
        raise RecordError(
            "GRPO needs advantages, or else a reward of each sample in a batch of whole groups, as "
            "lease.batch() returns it: the maker must fill one of them.",
            field="reward" if reward is None else "advantages",
        )
    sessions = [(each or {}).get(SESSION) for each in per_sample(experience, "extras", size)]
    groups, rewards = index.tolist(), reward.reshape(size).tolist()
    firsts: dict[object, int] = {}  # row of the first sample of each session
    rows = [
        firsts.setdefault(each if isinstance(each[1], str) else row, row)
        for row, each in enumerate(zip(groups, sessions, rewards, strict=True))
    ]
    chosen = torch.tensor(list(firsts.values()), device=reward.device)
    found = torch.zeros(size, device=reward.device)
    found[chosen] = group_relative_advantages(
        reward.reshape(size)[chosen],
        group_index=index.to(reward.device)[chosen],
        scale_by_std=scale_by_std,
        method=method,
    )
    return found[torch.tensor(rows, device=reward.device)]
