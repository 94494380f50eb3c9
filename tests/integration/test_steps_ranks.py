"""Two real ranks train by DDP and by FSDP as one process trains both their batches."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import Tensor

import redrb
from tests import warm
from tests.conftest import REAL
from tests.integration.steps_rank import GROUPS, STEPS, train
from tests.networks import VOCABULARY


def group(number: int) -> list[redrb.BufferItem]:
    """Return two samples of lengths and log-probabilities that differ."""
    draw = torch.Generator().manual_seed(number)
    items = []
    for _ in range(2):
        prompt, actions = torch.randint(2, 8, (2,), generator=draw).tolist()
        items.append(
            redrb.BufferItem(
                torch.randint(VOCABULARY, (prompt + actions,), generator=draw),
                -torch.rand(actions, generator=draw) - 2,
                reward=torch.rand((), generator=draw),
                advantages=torch.randn((), generator=draw),
                policy_version=0,
            )
        )
    return items


@pytest.fixture
def scope() -> Iterator[ExitStack]:
    with ExitStack() as scope:
        yield scope


def test_ranks_train_as_one_process_trains_both_batches(
    server_urls: Callable[[str], str], namespace: str, tmp_path: Path, scope: ExitStack
) -> None:
    url = server_urls(next(iter(REAL)))
    client = scope.enter_context(redrb.connect(url))
    names = {mode: f"{namespace}-{mode}" for mode in ("one", "replicate", "shard")}
    for name in names.values():
        stream = scope.enter_context(redrb.ExperienceStream(client, "shared", namespace=name))
        stream.put_many([group(number) for number in range(STEPS * GROUPS)])
    command = [sys.executable, "-m", "tests.integration.steps_rank", url, namespace, tmp_path]
    ranks = [
        warm.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    for process in ranks:
        scope.callback(process.wait)
        scope.callback(process.kill)
    expected = train(
        url, names["one"], tmp_path / "one", shard=False, name="trainer_0", train_batch_size=GROUPS
    )
    assert [metrics["staleness_max"] for metrics in expected] == [0.0, 1.0, 2.0, 3.0]
    for process in ranks:
        output, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors
        for found in map(json.loads, output.splitlines()):
            for own, one in zip(found, expected, strict=True):
                for name in ("actor_loss", "actor_grad_norm", "ratio_max", "approx_kl", "reward"):
                    assert own[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), name

    def published(mode: str) -> dict[str, Tensor]:
        return redrb.WeightSubscriber(client, "trainer_0", namespace=names[mode]).fetch()

    one = published("one")
    for mode in ("replicate", "shard"):
        torch.testing.assert_close(published(mode), one, rtol=1e-5, atol=1e-6)
