"""The maker and TRL's trainer of a job on a real vLLM; called with `maker` or `trl`, and a job."""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import redrb
from redrb import BufferItem, ExperienceStream
from redrb.train.engines import Engine, EngineWeights, Trajectory, VLLMEngine
from redrb.train.episodes import EpisodeMaker

TASK, TOKENS, GROUP, GROUPS = "math", 24, 4, 4
"""The task; new tokens of a sample, samples of a group, groups of a step."""

STAY_S = 300.0
"""Longest time for which Redis or the server of a job may be away."""


@dataclass(frozen=True)
class Job:
    """A job.

    Attributes:
        url: URL of Redis.
        namespace: Its namespace.
        engine: URL of vLLM.
        model: Folder of the model that vLLM started with.
        policy: Folder of the model that is trained.
        folder: For versions, checkpoints and logs.
        weights: Name of the weights.
        prefix: Of the names of their tensors, without the dot.
    """

    url: str
    namespace: str
    engine: str
    model: str
    policy: str
    folder: str
    weights: str
    prefix: str

    def json(self) -> str:
        """Return it as an argument of a process."""
        return json.dumps(asdict(self))

    def stream(self, client: redrb.Client, **options: Any) -> ExperienceStream:
        """Open the task."""
        return ExperienceStream(
            client, TASK, namespace=self.namespace, weights=self.weights, **options
        )


def reward(tokens: list[int]) -> float:
    """Return the share of tokens of the upper half of the vocabulary."""
    return sum(token >= 140 for token in tokens) / TOKENS


async def episode(prompt: list[int], engine: Engine) -> BufferItem:
    """Sample one completion."""
    trajectory = Trajectory(prompt)
    while len(trajectory.actions) < TOKENS and not trajectory.aborted:
        left = TOKENS - len(trajectory.actions)
        trajectory.sampled(
            await engine.generate(trajectory.tokens, max_new_tokens=left, ignore_eos=True)
        )
    return trajectory.item(reward=reward(list(trajectory.actions)))


def prompts() -> Iterator[list[int]]:
    """Yield random prompts for ever."""
    for _ in itertools.count():
        yield [random.randrange(10, 270) for _ in range(3)]


def make(job: Job) -> None:
    """Make groups until the process ends."""
    with redrb.connect(job.url, retry_s=STAY_S) as client, ExitStack() as stack:
        # the trainer creates the task, with its settings
        redrb.WeightSubscriber(client, job.weights, namespace=job.namespace).wait(timeout=STAY_S)
        stream = stack.enter_context(job.stream(client, lease_ms=3000))
        engine = VLLMEngine(job.engine, model=job.model, retry_s=STAY_S)
        weights = EngineWeights(
            client,
            job.weights,
            engine,
            Path(job.folder) / "versions",
            namespace=job.namespace,
            model=job.prefix,
        )
        EpisodeMaker(
            stream, episode, engine, weights=weights, group_size=GROUP, groups=2 * GROUPS
        ).run(prompts())


def train(job: Job) -> None:
    """Train by TRL from its newest checkpoint, until the process ends."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.trainer_utils import get_last_checkpoint
    from trl import GRPOConfig, GRPOTrainer

    from redrb.compat.trl import TaskRollouts, maker_reward, placeholder_prompts

    torch.set_num_threads(1)
    checkpoints = Path(job.folder) / "trl"
    checkpoints.mkdir(exist_ok=True)
    steps = 20_000
    with (
        redrb.connect(job.url, retry_s=STAY_S) as client,
        job.stream(client, max_staleness=4, lease_ms=3000) as stream,
        redrb.WeightPublisher(client, job.weights, namespace=job.namespace) as publisher,
        TaskRollouts(stream, publisher=publisher, acknowledge="save", timeout=STAY_S) as rollouts,
    ):
        GRPOTrainer(
            AutoModelForCausalLM.from_pretrained(job.policy, dtype=torch.float32),
            maker_reward,
            GRPOConfig(
                str(checkpoints),
                num_generations=GROUP,
                per_device_train_batch_size=GROUPS * GROUP,
                max_completion_length=TOKENS,
                learning_rate=1e-3,
                lr_scheduler_type="constant",
                max_steps=steps,
                vllm_importance_sampling_mode="token_truncate",
                logging_steps=1,
                report_to="none",
                save_strategy="steps",
                save_steps=2,
                save_total_limit=2,
                gradient_checkpointing=False,
                use_cpu=True,
                bf16=False,
            ),
            train_dataset=placeholder_prompts(GROUPS * steps),
            processing_class=AutoTokenizer.from_pretrained(job.policy),
            rollout_func=rollouts,
            callbacks=[rollouts],
        ).train(resume_from_checkpoint=get_last_checkpoint(str(checkpoints)))


if __name__ == "__main__":
    {"maker": make, "trl": train}[sys.argv[1]](Job(**json.loads(sys.argv[2])))
