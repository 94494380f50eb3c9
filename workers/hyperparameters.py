"""Hyper-parameters of making and of learning; free of torch, so that `--help` is quick.

Measured in one process with weights 0 to 3 versions old: held-out exact match goes from 0.33-0.39
to 0.95 within 11,000 completions on every seed tried.
"""

from __future__ import annotations

from dataclasses import dataclass

from redrb.options import option


@dataclass(frozen=True, kw_only=True)
class RolloutSettings:
    """How experience is made."""

    group_size: int = option(4, "completions of each prompt")
    kl_coef: float = option(0.01, "price of the divergence from the reference, in rewards a nat")
    gamma: float = option(1.0, "discount a token")
    lam: float = option(0.95, "GAE's lambda: 0 trusts the critic, 1 the sampled return")


@dataclass(frozen=True, kw_only=True)
class PPOSettings:
    """How a trainer learns from a batch."""

    actor_learning_rate: float = option(1e-3, "of Adam, for the actor")
    critic_learning_rate: float = option(2e-3, "of Adam, for the critic")
    clip: float = option(0.2, "clipping range of the ratio, PPO's epsilon")
    value_clip: float = option(0.5, "how far a value may move from the one that the maker noted")
    entropy_coef: float = option(0.0, "weight of the entropy bonus")
    max_grad_norm: float = option(1.0, "gradients of actor and critic are scaled down to it, each")
