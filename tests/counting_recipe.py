"""A recipe for tests of whole jobs: each step adds 1 to a weight, whose value is the reward."""

from __future__ import annotations

import threading
from pathlib import Path

import torch
from torch import nn

from redrb import BufferItem
from redrb.recipe import Recipe, option


class Counting(Recipe):
    """Counts steps."""

    groups = 2
    prompts_per_step = 2
    group_size = 1
    evaluate_every = 1
    checkpoint_every = 2
    device = "cpu"
    fails: str = option("", "name of a maker that raises")
    stuck: str = option("", "named pipe that the first step writes to, before it blocks")
    hangs: str = option("", "named pipe that maker-1 writes to, before its reward blocks for ever")

    def models(self):
        return {"actor": nn.Linear(1, 1)}

    def initialise(self, models):
        nn.init.zeros_(models["actor"].weight)

    def prompts(self):
        if self.worker == self.fails:
            raise ValueError(f"{self.worker} cannot count")
        return [{"prompt": "a"}, {"prompt": "b"}]

    def rollout(self, models, prompt):
        print("a line of the recipe")
        if self.hangs and self.worker == "maker-1":
            Path(self.hangs).write_text("begun")
            threading.Event().wait()
        return [BufferItem(torch.tensor([1, 2, 3]), torch.zeros(2), reward=torch.tensor(1.0))]

    def optimizers(self, models):
        return {"actor": torch.optim.SGD(models["actor"].parameters(), lr=1.0)}

    def step(self, models, optimizers, experience):
        if self.stuck:
            Path(self.stuck).write_text("begun")
            threading.Event().wait()
        with torch.no_grad():
            models["actor"].weight += 1.0
        return {}

    def evaluate(self, models):
        return {"reward": float(models["actor"].weight)}
