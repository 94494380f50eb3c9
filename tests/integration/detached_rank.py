"""One rank of a data-parallel `DetachedTrainer`: a process of its own, which may die at a step."""

from __future__ import annotations

import json
import os
import signal
import sys
from datetime import timedelta
from typing import Any

import torch
from torch import distributed, nn

import redrb

STEPS = 6


class Trainer(redrb.DetachedTrainer):
    """Trains one replicated number on the numbers of its part."""

    def __init__(self, *args: Any, die_at: int, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = redrb.DDPStrategy("cpu").prepare(nn.Linear(1, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.5)
        self.die_at = die_at
        self.steps = 0
        super().__init__(*args, **options)

    def training_step(self, experience: redrb.Experience) -> dict[str, float]:
        assert experience.reward is not None
        if self.steps == self.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.steps += 1
        self.optimizer.zero_grad()
        loss = (self.model(experience.reward[:, None] / 50) - torch.rand(())).square().mean()
        loss.backward()
        self.optimizer.step()
        print(json.dumps({"trained": experience.reward.tolist()}), flush=True)
        return {"loss": loss.item()}

    def _update_remote_makers(self, fully_update: bool = False, **config: Any) -> None:
        self.push_weights({"actor": self.model}, fully_update=fully_update)


def main(url: str, namespace: str, rank: int, directory: str, meeting: str, die_at: int) -> None:
    """Train as one of two ranks, and print what the model is at the end."""
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
        ack="checkpoint",
        checkpoint_dir=directory,
        lease_ms=2000,
        timeout=20,
        die_at=die_at,
    ) as trainer:
        trainer.fit(STEPS, 1)
        parameters = [p.item() for p in trainer.model.parameters()]
    print(json.dumps({"parameters": parameters, "version": trainer.weight_version}), flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    _, url, namespace, rank, directory, meeting, die_at = sys.argv
    main(url, namespace, int(rank), directory, meeting, int(die_at))
