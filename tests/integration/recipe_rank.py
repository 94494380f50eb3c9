"""One of two ranks that train recipes of GRPO and PPO: replicated, then sharded and resumed."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
from torch import distributed, nn

import redrb
from redrb.errors import ConfigError
from redrb.recipe import GRPORecipe, PPORecipe, Recipe
from redrb.recipe.trainer import RecipeTrainer
from tests.integration.leaving import leave
from tests.integration.steps_rank import Actor
from tests.networks import PlainCritic, seeded

STEPS, GROUPS = 4, 2
"""Steps, and groups that each rank trains in a step."""

SETTINGS: Mapping[str, Any] = {
    "task": "shared",
    "groups": GROUPS,
    "max_staleness": -1,
    "device": "cpu",
    "weights_dtype": "float32",
    "checkpoint_every": 1,
    "idle_timeout": 20.0,
}


class Grouped(GRPORecipe):
    """GRPO with a price of the divergence from the first policy."""

    learning_rate = 1e-2
    beta = 0.5

    def model(self) -> nn.Module:
        return seeded(Actor)

    def prompts(self) -> list[dict[str, Any]]:
        return []

    def reward(self, completion: object) -> float:
        raise AssertionError(completion)


class Valued(PPORecipe):
    """PPO with a critic of its own, and a price of the divergence from the first policy."""

    actor_learning_rate = critic_learning_rate = 1e-2

    def model(self) -> nn.Module:
        return seeded(Actor)

    def critic(self, actor: nn.Module) -> nn.Module:
        return seeded(PlainCritic, 1)

    def prompts(self) -> list[dict[str, Any]]:
        return []

    def reward(self, completion: object) -> float:
        raise AssertionError(completion)


class Shared(Valued):
    """PPO whose critic has the trunk of the actor."""

    def critic(self, actor: nn.Module) -> nn.Module:
        critic = seeded(PlainCritic, 1)
        critic.trunk = actor.trunk
        return critic


RECIPES: Mapping[str, type[Recipe]] = {"grpo": Grouped, "ppo": Valued}


def train(client: redrb.Client, recipe: Recipe, rewards: list[float]) -> list[int]:
    """Train as one rank to the recipe's last step; return the steps that this trainer took."""
    steps: list[int] = []

    def write(event: str, **values: Any) -> None:
        if event == "step":
            steps.append(values["step"])
        elif event == "evaluation":
            rewards.append(values["reward"])

    with RecipeTrainer(client, recipe, write) as trainer:
        trainer.begin()
        trainer.work()
    return steps


def main(url: str, namespace: str, directory: str, rank: int) -> None:
    """Train each recipe in both ways, and print the steps of each trainer."""
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{directory}/meeting",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=30),
    )
    found: dict[str, Any] = {}
    with redrb.connect(url) as client:
        for mode, ends in (("replicate", [STEPS]), ("shard", [STEPS // 2, STEPS])):
            for name, kind in RECIPES.items():
                settings = {
                    **SETTINGS,
                    "namespace": f"{namespace}-{name}-{mode}",
                    "checkpoints": f"{directory}/{name}-{mode}",
                    "shard": mode == "shard",
                }
                rewards = found.setdefault(f"{name}-{mode}-rewards", [])
                found[f"{name}-{mode}"] = [
                    train(client, kind(**settings, steps=end), rewards) for end in ends
                ]
        for name, kind in (("grpo", Grouped), ("shared", Shared)):
            settings = {  # of "grpo" those of the replicated job
                **SETTINGS,
                "namespace": f"{namespace}-{name}-replicate",
                "checkpoints": f"{directory}/{name}-replicate",
                "shard": True,
            }
            try:
                train(client, kind(**settings), [])
            except ConfigError as error:
                found[f"{name}-refused"] = str(error)
    print(json.dumps(found), flush=True)
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]))
