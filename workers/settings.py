"""The options of makers and trainers: flags or REDRB_* variables. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from redrb.errors import ConfigError
from redrb.keys import check_name
from redrb.options import Settings, flag_of, option, url_option, variable_of


@dataclass(frozen=True, kw_only=True)
class RunSettings(Settings):
    """Options that all workers of one run share."""

    url: str = url_option(
        "where Redis is, e.g. redis://host:6379/0; a password only in the variable"
    )
    namespace: str = option("default", "keeps experiments on one server apart")
    task: str = option("sort", "task whose stream the workers share")
    weights: str = option("", "name under which weights are published; default: the task's")
    seed: int = option(0, "seed of the warm start and of the sampling", least=0, most=2**63 - 1)
    limit: int = option(0, "most groups of the task that may wait or be leased; 0: any", least=0)
    max_staleness: int = option(
        2,
        "most weight versions that a group may be behind when it is trained; makers begin no group "
        "that would come too late; -1: no bound",
        least=-1,
    )
    min_replicas: int = option(
        0, "replicas of Redis that must have received a put before it returns", least=0
    )
    stop_timeout: float = option(
        20.0, "seconds that the worker may spend on Redis after SIGTERM or Ctrl-C", least=0
    )
    metrics: str = option("", "file for metrics as JSON lines; - is standard output")
    threads: int = option(1, "CPU threads of torch", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("namespace", "task", "weights"):
            if name != "weights" or self.weights:
                check_name(flag_of(name), getattr(self, name))

    @property
    def policy(self) -> str:
        """Name of the weights of actor and critic, and of the trainer that publishes them."""
        return self.weights or self.task

    @property
    def bound(self) -> dict[str, Any]:
        """Settings of the task that bound staleness."""
        if self.max_staleness < 0:
            return {}
        return {"max_staleness": self.max_staleness, "order": "admission"}

    @property
    def reference(self) -> str:
        """Name of the weights of the reference policy, for the KL divergence."""
        return f"{self.policy}-reference"


@dataclass(frozen=True, kw_only=True)
class MakerSettings(Settings):
    """Options of a maker."""

    worker: str = option(
        "", "name of this maker; seeds its sampling; default: host, process id and random digits"
    )
    prompts: int = option(32, "prompts a step; each becomes one group", least=1)
    steps: int = option(0, "steps after which the maker ends; 0: never by itself", least=0)
    weights_timeout: float = option(120.0, "seconds to wait for the first weights", least=0)
    in_flight_updates: bool = option(
        False, "change weights between tokens, not only between batches of prompts"
    )


@dataclass(frozen=True, kw_only=True)
class TrainerSettings(Settings):
    """Options of the trainer."""

    worker: str = option("trainer", "name of this trainer")
    groups: int = option(32, "groups a batch", least=1)
    publish_every: int = option(1, "steps between published weight versions", least=1)
    weights_dtype: str = option(
        "bfloat16", "dtype of published weights; in float32 nearly all of them change at each step"
    )
    evaluate_every: int = option(10, "steps between evaluations on held-out prompts", least=1)
    target_reward: float = option(0.97, "held-out reward at which training ends")
    steps: int = option(0, "steps after which training ends; 0: no such end", least=0)
    max_seconds: float = option(0.0, "seconds after which training ends; 0: no such end", least=0)
    lease_ms: int = option(
        10_000,
        "ms without a heartbeat after which other trainers take over this one's leases",
        least=100,
    )
    idle_timeout: float = option(
        300.0, "seconds without a full batch after which training fails", least=0
    )


@dataclass(frozen=True, kw_only=True)
class StageSettings(Settings):
    """Options of a stage."""

    url: str = url_option(
        "where Redis is, e.g. redis://host:6379/0; a password only in the variable"
    )
    namespace: str = option("default", "keeps experiments on one server apart")
    from_: str = option("", "task that groups are taken from")
    to: str = option("", "task that they are forwarded to")
    group: str = option("default", "consumer group of the stage; each gets every group of samples")
    batch: int = option(16, "most groups of a batch", least=1)
    batched: bool = option(
        False, "call the function with a list of groups, which returns a result for each"
    )
    lease_ms: int = option(
        10_000,
        "ms without a heartbeat after which other stages take over this one's leases",
        least=100,
    )
    min_replicas: int = option(
        0, "replicas of Redis that must have received a group before it leaves its task", least=0
    )
    stop_timeout: float = option(
        20.0, "seconds that the stage may spend on Redis after SIGTERM or Ctrl-C", least=0
    )
    threads: int = option(1, "CPU threads of torch", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("from_", "to"):
            if not getattr(self, name):
                raise ConfigError(f"{flag_of(name)} TASK (or {variable_of(name)}) is missing.")
        for name in ("namespace", "from_", "to", "group"):
            check_name(flag_of(name), getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class RolloutSettings(Settings):
    """Options for making experience."""

    group_size: int = option(4, "completions of each prompt", least=1)
    kl_coef: float = option(
        0.01, "weight of the KL divergence from the reference policy, in rewards a nat", least=0
    )
    gamma: float = option(1.0, "discount a token", least=0, most=1)
    lam: float = option(
        0.95, "GAE's lambda: 0 trusts the critic, 1 the sampled return", least=0, most=1
    )


@dataclass(frozen=True, kw_only=True)
class PPOSettings(Settings):
    """Options of PPO."""

    actor_learning_rate: float = option(1e-3, "of Adam, for the actor", least=0)
    critic_learning_rate: float = option(2e-3, "of Adam, for the critic", least=0)
    clip: float = option(0.2, "clipping range of the ratio, PPO's epsilon", above=0)
    value_clip: float = option(
        0.5, "how far a value may move from the value at the time of making", above=0
    )
    entropy_coef: float = option(0.0, "weight of the entropy bonus", least=0)
    max_grad_norm: float = option(
        1.0, "largest norm of the gradients of actor and critic, each", above=0
    )
