"""What makers and trainers can be told, by flags or REDRB_* variables. No torch in here."""

from __future__ import annotations

from dataclasses import dataclass

from redrb.options import option


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """What all workers of one run share."""

    url: str = option("", "where Redis is, e.g. redis://[user:password@]host:6379/0")
    namespace: str = option("default", "keeps experiments on one server apart")
    task: str = option("sort", "task whose stream the workers share")
    weights: str = option("policy", "name under which weights are published")
    seed: int = option(0, "seed of the warm start and of the sampling")
    limit: int = option(96, "most groups of the task that may wait or be leased")
    metrics: str = option("", "file for metrics as JSON lines; - is standard output")
    threads: int = option(1, "CPU threads of torch")


@dataclass(frozen=True, kw_only=True)
class MakerSettings:
    """What a maker does."""

    worker: str = option("", "name of this maker; default: host and process id")
    prompts: int = option(32, "prompts a step; each becomes one group")
    steps: int = option(0, "steps after which the maker ends; 0: when it is told to")
    weights_timeout: float = option(120.0, "seconds to wait for the first weights")


@dataclass(frozen=True, kw_only=True)
class TrainerSettings:
    """What the trainer does."""

    worker: str = option("trainer", "name of this trainer")
    groups: int = option(32, "groups a batch")
    publish_every: int = option(1, "steps between published weight versions")
    evaluate_every: int = option(10, "steps between evaluations on held-out prompts")
    target_reward: float = option(0.97, "held-out reward at which training ends")
    steps: int = option(0, "steps after which training ends; 0: no such end")
    max_seconds: float = option(0.0, "seconds after which training ends; 0: no such end")
    lease_ms: int = option(10_000, "silence after which others take this trainer's leases over")
    idle_timeout: float = option(300.0, "seconds without a full batch after which it gives up")


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
