"""One rank of a data-parallel `DetachedTrainer`: a process that may die at a step."""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from typing import Any

import torch
from torch import distributed, nn

import redrb
from redrb.compat.coati import TrainerPerformanceEvaluator
from tests.integration.leaving import leave

STEPS = 6


class Trainer(redrb.DetachedTrainer):
    """Trains one replicated number on the numbers of its part."""

    def __init__(self, *args: Any, at: int, number: int, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = redrb.train.AccelerateStrategy("cpu").prepare(nn.Linear(1, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.5)
        self.at, self.number = at, number
        self.steps = 0
        super().__init__(*args, **options)

    def training_step(self, experience: redrb.Experience) -> dict[str, float]:
        if self.steps == self.at:
            os.kill(os.getpid(), self.number)
        self.steps += 1
        self.optimizer.zero_grad()
        loss = (self.model(experience.reward[:, None] / 50) - torch.rand(())).square().mean()
        loss.backward()
        self.optimizer.step()
        print(json.dumps({"trained": experience.reward.tolist()}), flush=True)
        return {"loss": loss.item()}

    def _update_remote_makers(self, fully_update: bool = False, **config: Any) -> None:
        self.push_weights({"actor": self.model}, fully_update=fully_update)


def main(
    url: str,
    namespace: str,
    rank: int,
    directory: str,
    meeting: str,
    ack: Any,
    at: int,
    number: int,
) -> None:
    """Train as one of two ranks, get a signal at a step, and print the model at the end."""
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=15),
    )
    with Trainer(
        ["maker_0"],
        4,
        client=url,
        namespace=namespace,
        name=f"trainer_{rank}",
        task="shared",
        rank=rank,
        world_size=2,
        ack=ack,
        checkpoint_dir=directory,
        checkpoint_every=2,
        callbacks=[TrainerPerformanceEvaluator(ignore_first_episodes=0)],
        lease_ms=2000,
        timeout=20,
        at=at,
        number=number,
    ) as trainer:
        trainer.fit(STEPS, 1)
        parameters = [p.item() for p in trainer.model.parameters()]
    result = {"parameters": parameters, "version": trainer.weight_version, "why": trainer.stopped}
    print(json.dumps(result), flush=True)
    leave()


if __name__ == "__main__":
    _, url, namespace, rank, directory, meeting, ack, at, number = sys.argv
    main(url, namespace, int(rank), directory, meeting, ack, int(at), int(number))
