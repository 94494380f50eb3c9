"""The settings of every job, and those in which all its workers must agree."""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from typing import Any

from redrb.keys import check_name, reference_weights
from redrb.options import flag_of, has_password, option, url_option
from redrb.recipe.settings import RecipeSettings, settings_of


class JobSettings(RecipeSettings):
    """Settings that all workers of a job share."""

    url: str = url_option(
        "where Redis is, e.g. redis://host:6379/0; a password only in the variable"
    )
    namespace: str = option("default", "keeps experiments on one server apart")
    task: str = option(
        "",
        "task whose stream the workers share; default: the recipe's class in lower case",
    )
    weights: str = option("", "name under which weights are published; default: the task's")
    worker: str = option(
        "",
        "name of this process; seeds its sampling; default of a maker: host, process id and "
        "random digits, of the trainer: trainer",
    )
    seed: int = option(0, "seed of the first weights and of the sampling", least=0, most=2**63 - 1)
    limit: int = option(0, "most groups of the task that may wait or be leased; 0: any", least=0)
    max_staleness: int = option(
        2,
        "most weight versions that a group may be behind when it is trained; makers begin no group "
        "that would come too late; -1: no bound",
        least=-1,
    )
    order: str = option(
        "",
        "order in which groups are trained, such as fifo, stalest or freshest; default: with a "
        "bound of staleness admission, else fifo",
    )
    min_replicas: int = option(
        0, "replicas of Redis that must have received a put before it returns", least=0
    )
    stop_timeout: float = option(
        20.0, "seconds that the worker may spend on Redis after SIGTERM or Ctrl-C", least=0
    )
    metrics: str = option("", "file for metrics as JSON lines; - is standard output")
    tensorboard: str = option("", "folder for TensorBoard, with a folder for each worker")
    wandb: str = option("", "project of Weights & Biases, in which each worker is a run")
    device: str = option("", "device of the models; default: the accelerator if there is one")
    threads: int = option(1, "CPU threads of torch", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_name(flag_of("namespace"), self.namespace)
        for name in ("task", "weights", "worker"):
            if getattr(self, name):
                check_name(flag_of(name), getattr(self, name))

    @property
    def name(self) -> str:
        """Name of the job in keys and folders: the name of its class in lower case."""
        return type(self).__name__.lower()

    @property
    def task_name(self) -> str:
        """Name of the task."""
        return self.task or self.name

    @property
    def weights_name(self) -> str:
        """Name of the published weights, and of the trainer that publishes them."""
        return self.weights or self.task_name

    @property
    def reference_name(self) -> str:
        """Name of the weights of the reference policy."""
        return reference_weights(self.weights_name)

    @property
    def worker_seed(self) -> int:
        """Seed of this process: another one for each maker, the same for the same name."""
        return zlib.crc32(f"{self.seed} {self.worker}".encode())

    @property
    def stream_settings(self) -> dict[str, Any]:
        """Settings of the task: its order, and its bound of staleness."""
        order = {"order": self.order} if self.order else {}
        if self.max_staleness < 0:
            return order
        return {"max_staleness": self.max_staleness, "order": "admission", **order}


class MakerSettings(RecipeSettings):
    """Settings of makers."""

    group_size: int = option(8, "samples of each prompt, which become one group", least=1)
    prompts_per_step: int = option(32, "prompts a step; each becomes one group", least=1)
    shuffle: bool = option(True, "draw prompts in random order, another one for each maker")
    maker_steps: int = option(0, "steps after which a maker ends; 0: never by itself", least=0)
    weights_timeout: float = option(120.0, "seconds to wait for the first weights", least=0)
    rollout_timeout: float = option(
        300.0, "seconds that a rollout may last if it is a coroutine; longer ones fail", above=0
    )
    in_flight_updates: bool = option(
        False, "change weights between tokens, not only between batches of prompts"
    )


class TrainerSettings(RecipeSettings):
    """Settings of the trainer."""

    groups: int = option(32, "groups a batch; of several ranks each trains as many", least=1)
    publish_every: int = option(1, "steps between published weight versions", least=1)
    weights_dtype: str = option(
        "bfloat16", "dtype of published weights; in float32 nearly all of them change at each step"
    )
    evaluate_every: int = option(10, "steps between evaluations", least=1)
    target_reward: float = option(
        math.inf,
        "evaluated reward at which training ends, once at least one step was trained; inf: none",
    )
    steps: int = option(0, "steps after which training ends; 0: no such end", least=0)
    max_seconds: float = option(0.0, "seconds after which training ends; 0: no such end", least=0)
    checkpoints: str = option("", "folder for checkpoints, from which the next trainer goes on")
    checkpoint_every: int = option(50, "weight versions between two checkpoints", least=1)
    lease_ms: int = option(
        10_000,
        "ms without a heartbeat after which others take over a worker's leases and rights",
        least=100,
    )
    idle_timeout: float = option(
        300.0, "seconds without a full batch after which training fails", least=0
    )
    step_limit: float = option(
        0.0,
        "seconds after which redrb doctor, top and the page say that a step hangs; 0: ten times "
        "the longest step of late, and at least a minute",
        least=0,
    )
    mixed_precision: str = option(
        "no",
        "bf16: the trainer computes in bfloat16, and keeps weights and optimizers in their dtype",
        choices=("no", "bf16"),
    )
    gradient_checkpointing: bool = option(
        False, "compute activations again in the backward pass, to save memory"
    )
    shard: bool = option(
        False, "shard models and optimizers over the ranks (FSDP2), instead of replicating them"
    )


class StepSettings(RecipeSettings):
    """Settings of the training step."""

    clip: float = option(0.2, "lower clipping range of the ratio", above=0)
    clip_high: float = option(
        0.0, "upper clipping range of the ratio, 0.28 in DAPO; 0: as the lower one", least=0
    )
    aggregation: str = option(
        "token", "how losses of actions become one number", choices=("token", "sequence")
    )
    truncated_importance: float = option(
        0.0,
        "cap of truncated importance sampling, such as 2, which corrects log-probabilities of "
        "makers that differ from the trainer's; 0: off",
        least=0,
    )
    max_grad_norm: float = option(1.0, "largest norm of the gradients of each model", above=0)
    micro_batch_size: int = option(
        0, "most samples in a forward pass of the trainer; 0: the whole batch", least=0
    )
    micro_batch_tokens: int = option(
        0,
        "most tokens in a forward pass of the trainer, padding included; 0: the whole batch",
        least=0,
    )

    @property
    def step_options(self) -> dict[str, Any]:
        """These settings, as `redrb.algorithms.PPOStep` and `GRPOStep` take them."""
        return {
            "clip": self.clip,
            "clip_high": self.clip_high or None,
            "aggregation": self.aggregation,
            "truncated_importance": self.truncated_importance or None,
            "max_grad_norm": self.max_grad_norm,
            "micro_batch_size": self.micro_batch_size or None,
            "micro_batch_tokens": self.micro_batch_tokens or None,
        }


class EngineSettings(RecipeSettings):
    """Settings of what samples completions."""

    engine: str = option(
        "local",
        "what samples: local, the maker's own copy of the model, or a server of vLLM or SGLang",
        choices=("local", "vllm", "sglang"),
    )
    engine_url: str = option("http://localhost:8000", "address of the server that a maker uses")
    engine_folder: str = option(
        "",
        "folder in which the maker writes weights and the server reads them; default: a folder of "
        "the job in /dev/shm, for a server on the maker's machine",
    )


_MOST = 64
"""Longest text of a value that is announced; of longer ones the digest is."""

_OF_ONE_SIDE = (JobSettings, MakerSettings, TrainerSettings, StepSettings, EngineSettings)
"""Classes with settings that only makers, only the trainer, or the process use."""


def agreed_settings(recipe: RecipeSettings) -> dict[str, str]:
    """Return the text of each setting in which makers and trainer of a recipe must agree.

    They are those of the recipe itself, such as the size of its tasks, and of sampling; not those
    that are declared with `agree=False`, such as a learning rate.
    """
    others = {name for each in _OF_ONE_SIDE for name in settings_of(each)}
    return {
        name: _text(getattr(recipe, name))
        for name, item in settings_of(type(recipe)).items()
        if name not in others and item.metadata["agree"]
    }


def _text(value: float | str) -> str:
    text = json.dumps(value)
    if len(text) > _MOST or (isinstance(value, str) and has_password(value)):
        return f"a text with the digest {hashlib.sha256(text.encode()).hexdigest()[:12]}"
    return text
