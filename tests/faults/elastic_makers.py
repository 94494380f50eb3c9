"""Makers for the test of elasticity: processes that join a run by themselves."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

import redrb

GROUPS, GROUP_SIZE = 4, 2
MAKE_S = 0.1


class NumberedMaker:
    """Makes groups with unique names, each in a fixed time."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._made = 0

    def make_experience(self, inputs: Any, **generate_kwargs: Any) -> redrb.Experience:
        time.sleep(MAKE_S)
        self._made += 1
        rows = GROUPS * GROUP_SIZE
        return redrb.Experience(
            sequences=torch.ones(rows, 8, dtype=torch.int64),
            action_log_probs=torch.zeros(rows, 4),
            values=torch.zeros(rows, 4),
            reward=torch.zeros(rows),
            kl=torch.zeros(rows, 4),
            advantages=torch.zeros(rows, 4),
            group_id=[f"{self._name}/{self._made}/{row // GROUP_SIZE}" for row in range(rows)],
        )


class Holder(redrb.ExperienceMakerHolder):
    def build_experience_maker(self, *models: Any) -> NumberedMaker:
        return NumberedMaker(self.name)


def make(url: str, namespace: str, name: str) -> None:
    """Make until killed, or until SIGTERM comes."""
    torch.set_num_threads(1)
    with Holder(
        ["trainer_0"],
        lambda: redrb.Strategy("cpu"),
        lambda: (nn.Linear(2, 2), None, None, None),
        sync_models_from_trainers=True,
        name=name,
        client=url,
        namespace=namespace,
    ) as maker:
        maker.workingloop(lambda: iter(lambda: torch.zeros(1, 1), None))
