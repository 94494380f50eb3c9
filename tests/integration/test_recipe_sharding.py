"""Two real ranks: sharded recipes resume, and train as replicated ones that never stopped."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import Tensor

import redrb
from tests import warm
from tests.conftest import REAL
from tests.integration.recipe_rank import GROUPS, RECIPES, STEPS
from tests.integration.steps_rank import Actor
from tests.networks import VOCABULARY, seeded


def group(number: int) -> list[redrb.BufferItem]:
    """Return two samples with all that GRPO with a reference policy and PPO need."""
    draw = torch.Generator().manual_seed(number)
    items = []
    for _ in range(2):
        prompt, actions = torch.randint(2, 8, (2,), generator=draw).tolist()
        items.append(
            redrb.BufferItem(
                torch.randint(VOCABULARY, (prompt + actions,), generator=draw),
                -torch.rand(actions, generator=draw) - 2,
                values=torch.randn(actions, generator=draw),
                reward=torch.rand((), generator=draw),
                kl=torch.rand(actions, generator=draw),
                advantages=torch.randn(actions, generator=draw),
                tensors={"reference_log_probs": -torch.rand(actions, generator=draw) - 2},
            )
        )
    return items


def test_sharded_recipes_resume(
    server_urls: Callable[[str], str], namespace: str, tmp_path: Path
) -> None:
    with ExitStack() as scope:
        url = server_urls(next(iter(REAL)))
        client = scope.enter_context(redrb.connect(url))
        jobs = [f"{name}-{mode}" for name in RECIPES for mode in ("replicate", "shard")]
        for job in jobs:
            stream = redrb.ExperienceStream(client, "shared", namespace=f"{namespace}-{job}")
            with stream:
                # and those of one more step, which the trainer takes ahead
                stream.put_many([group(number) for number in range((STEPS + 1) * GROUPS * 2)])
        command = [sys.executable, "-m", "tests.integration.recipe_rank", url, namespace, tmp_path]
        ranks = [
            warm.Popen(
                [*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            for rank in range(2)
        ]
        for process in ranks:
            scope.callback(process.wait)
            scope.callback(process.kill)
        first, second = range(1, STEPS // 2 + 1), range(STEPS // 2 + 1, STEPS + 1)
        for rank, process in enumerate(ranks):
            output, errors = process.communicate(timeout=60)
            assert process.returncode == 0, errors
            found = json.loads(output)
            assert "models.actor does not fit" in found["grpo-refused"]
            assert "sharded or not as before" in found["grpo-refused"]
            assert "PlainCritic cannot be sharded" in found["shared-refused"]
            assert "copy.deepcopy" in found["shared-refused"]
            for name in RECIPES if rank == 0 else ():  # the first rank reports
                assert found[f"{name}-replicate"] == [[*first, *second]]
                assert found[f"{name}-shard"] == [list(first), list(second)]
                samples = [item for n in range(STEPS * GROUPS * 2) for item in group(n)]
                reward = torch.stack([item.reward for item in samples]).mean().item()
                assert found[f"{name}-replicate-rewards"] == [pytest.approx(reward)]

        def published(job: str, name: str) -> dict[str, Tensor]:
            namespace_of_job = f"{namespace}-{job}"
            return redrb.WeightSubscriber(client, name, namespace=namespace_of_job).fetch()

        start = seeded(Actor).state_dict()
        for name in RECIPES:
            one, sharded = (
                published(f"{name}-{mode}", "shared") for mode in ("replicate", "shard")
            )
            torch.testing.assert_close(sharded, one, rtol=1e-4, atol=1e-5)
            assert not torch.equal(sharded["actor.head.weight"], start["head.weight"])
            reference = published(f"{name}-shard", "shared-reference")
            torch.testing.assert_close(reference, start, rtol=0, atol=0)
