"""A recipe whose weights count how often each sample was trained: none may be counted twice."""

from __future__ import annotations

import os
import threading

import redis
import torch
from torch import nn

from redrb import BufferItem
from redrb.recipe import Recipe

MOST_SAMPLES = 40_000

STEP_S = 0.1
"""Seconds of a step, so that a target takes as long on a fast machine as on a busy one."""


class Tallying(Recipe):
    """Its reward is the number of samples in the model, and each sample has a number of its own."""

    groups = 2
    prompts_per_step = 2
    group_size = 1
    evaluate_every = 10
    checkpoint_every = 10
    device = "cpu"
    lease_ms = 3_000

    def models(self):
        return {"actor": nn.Embedding(MOST_SAMPLES, 1)}

    def initialise(self, models):
        nn.init.zeros_(models["actor"].weight)

    def prompts(self):
        return [{"prompt": "a"}, {"prompt": "b"}]

    def rollout(self, models, prompt):
        with redis.Redis.from_url(os.environ["REDRB_URL"]) as client:
            number = client.incr("samples of the recipe")
        return [BufferItem(torch.tensor([1, number]), torch.zeros(1), reward=torch.tensor(1.0))]

    def optimizers(self, models):
        return {"actor": torch.optim.SGD(models["actor"].parameters(), lr=1.0)}

    def step(self, models, optimizers, experience):
        threading.Event().wait(STEP_S)
        with torch.no_grad():
            for number in experience.sequences[:, -1]:
                models["actor"].weight[number] += 1.0
        return {}

    def evaluate(self, models):
        counts = models["actor"].weight
        return {"reward": float(counts.sum()), "twice": int((counts > 1).sum())}
