"""A trainer that acknowledges after its checkpoint, and may die at a step: a process."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch
from torch import nn

import redrb

STEPS = 100
BATCH = 8


class Trainer(redrb.DetachedTrainer):
    """Counts its steps; holds the leases of all batches until its only checkpoint."""

    def __init__(self, *args: Any, dies_at: int, **options: Any) -> None:
        self.model = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.dies_at, self.steps = dies_at, 0
        super().__init__(*args, **options)

    def training_step(self, experience: redrb.Experience) -> dict[str, float]:
        if self.steps == self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.steps += 1
        return {"loss": float(len(experience.sequences))}

    def _update_remote_makers(self, fully_update: bool = False, **config: Any) -> None:
        self.push_weights({"actor": self.model}, fully_update=fully_update)


def main(url: str, namespace: str, directory: str, dies_at: str, name: str) -> None:
    """Train all batches, or die at a step."""
    torch.set_num_threads(1)
    with Trainer(
        ["maker_0"],
        BATCH,
        client=url,
        namespace=namespace,
        name=name,
        task="shared",
        ack="checkpoint",
        checkpoint_dir=directory,
        checkpoint_every=STEPS,
        lease_ms=1000,
        timeout=20,
        dies_at=int(dies_at),
    ) as trainer:
        trainer.fit(STEPS, STEPS)


if __name__ == "__main__":
    main(*sys.argv[1:])
