"""One rank of a `DetachedGRPOTrainer` whose model is replicated or sharded by Accelerate."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

import redrb
from redrb.train import AccelerateStrategy
from tests.integration.leaving import leave
from tests.networks import PlainActor, seeded

STEPS, GROUPS = 4, 4
"""Steps, and groups that all ranks train together in a step."""


class Actor(PlainActor):
    """An actor that names layers as models of transformers do: also one that it lacks."""

    _no_split_modules = ("Trunk", "VisionBlock")


class Trainer(redrb.DetachedGRPOTrainer):
    """Trains by SGD with momentum, whose steps show each difference of gradients."""

    def build_optimizer(self, model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.5)


def train(url: str, namespace: str, directory: Path, *, shard: bool, **options: Any) -> list[Any]:
    """Train half of the steps, the rest with a trainer that resumes; return all metrics."""
    metrics: list[Any] = []

    class Noting(redrb.TrainerCallback):
        def on_batch_end(self, metrics_of_batch: dict, experience: Any) -> None:
            metrics.append(metrics_of_batch)

    for calls in (1, 2):
        with Trainer(
            [],
            lambda: AccelerateStrategy("cpu", shard=shard),
            lambda: seeded(Actor),
            client=url,
            namespace=namespace,
            task="shared",
            checkpoint_dir=directory,
            actor_lr=0.5,
            callbacks=[Noting()],
            grpo_options={"micro_batch_tokens": 16, "truncated_importance": 2.0},
            timeout=20,
            **options,
        ) as trainer:
            for _ in range(calls):
                trainer.fit(STEPS // 2, 1)
    return metrics


def main(url: str, namespace: str, directory: str, rank: int) -> None:
    """Train as one of two ranks, replicated and then sharded, and print the metrics."""
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{directory}/meeting",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=30),
    )
    for mode in ("replicate", "shard"):
        metrics = train(
            url,
            f"{namespace}-{mode}",
            Path(directory) / mode,
            shard=mode == "shard",
            name=f"trainer_{rank}",
            train_batch_size=GROUPS // 2,
            rank=rank,
            world_size=2,
        )
        print(json.dumps(metrics), flush=True)
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]))
