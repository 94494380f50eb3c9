"""Ranks in real processes publish DTensors, and each reads its slices."""

import subprocess
import sys

import torch

import redrb
from tests import warm
from tests.conftest import REAL
from tests.integration.weight_ranks import whole

WORLD, STEPS = 2, 3


def test_a_sharded_model_is_gathered_published_and_read_whole_and_in_shards(
    server_urls, namespace, tmp_path
):
    real_url = server_urls(next(iter(REAL)))
    command = [sys.executable, "-m", "tests.integration.weight_ranks", real_url, namespace]
    ranks = [
        warm.Popen(
            [*command, str(rank), str(WORLD), str(tmp_path / "meeting"), str(STEPS)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD)
    ]
    try:
        for rank in ranks:
            said, errors = rank.communicate(timeout=60)
            assert rank.returncode == 0, errors
            assert said.split("\n")[:STEPS] == ["1", "2", "3"]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    with redrb.connect(real_url) as client:
        reader = redrb.WeightSubscriber(client, "actor", namespace=namespace)
        fetched, expected = reader.fetch(), whole(STEPS - 1)
        assert fetched.keys() == expected.keys()
        assert all(torch.equal(fetched[name], expected[name]) for name in expected)
        assert reader.latest().kind == "delta"
