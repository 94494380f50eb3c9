"""One of several ranks of a GRPOTrainer, started by torchrun for tests."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import torch.distributed as dist
import trl

import redrb
from redrb.compat.trl import TaskRollouts, maker_reward, placeholder_prompts
from tests.integration.leaving import leave
from tests.trl_jobs import config, tiny_model, tokenizer


def main(url: str, namespace: str, steps: int) -> None:
    """Train on this rank's part of each batch, and print the sum of the weights."""
    dist.init_process_group("gloo")
    client = redrb.connect(url)
    stream = redrb.ExperienceStream(client, "math", namespace=namespace)
    leads = os.environ["RANK"] == "0"
    publisher = redrb.WeightPublisher(client, "policy", namespace=namespace) if leads else None
    with (
        tempfile.TemporaryDirectory() as folder,
        TaskRollouts(stream, publisher=publisher, timeout=60) as rollouts,
    ):
        trainer = trl.GRPOTrainer(
            tiny_model(),
            maker_reward,
            config(Path(folder), max_steps=steps, learning_rate=1e-2),
            train_dataset=placeholder_prompts(64),
            processing_class=tokenizer(),
            rollout_func=rollouts,
            callbacks=[rollouts],
        )
        trainer.train()
    weight = sum(float(each.detach().sum()) for each in trainer.model.parameters())
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {weight:.5f}", flush=True)
    stream.close()
    leave()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
