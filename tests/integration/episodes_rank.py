"""A rank that evaluates a sharded recipe of episodes, whose tool answers in another order each."""

from __future__ import annotations

import asyncio
import random
import sys
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from redrb.algorithms.models import evaluating
from redrb.experience import BufferItem
from redrb.recipe.examples.multiturn import Multiturn
from redrb.recipe.local_engine import LocalEngine
from tests.integration.leaving import leave


class SlowTool(Multiturn):
    """Waits before each episode, on each rank for other times."""

    shard = True
    width = 16

    async def episode(self, prompt: dict[str, Any], engine: LocalEngine) -> BufferItem:
        await asyncio.sleep(random.random() / 10)
        return await super().episode(prompt, engine)

    def held_out(self) -> list[dict[str, Any]]:
        return self.prompts()[::50]


def main(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    random.seed(rank)
    torch.manual_seed(0)
    limit = timedelta(seconds=8)
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=limit
    )
    recipe = SlowTool()
    models: dict[str, Any] = recipe.models()
    mesh, actor = init_device_mesh("cpu", (2,)), models["actor"]
    for layer in actor.model.layers:  # its parameters are gathered again in each forward pass
        fully_shard(layer, mesh=mesh)
    fully_shard(actor, mesh=mesh)
    with torch.no_grad(), evaluating(*models.values()):
        found = [recipe.evaluate(models) for _ in range(2)]
    print([each if each is None else sorted(each) for each in found], flush=True)
    leave()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
