"""Makers on a real vLLM: log-probabilities are those of the version that a sample names."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

import redrb
from redrb import BufferItem, Client, ExperienceStream
from redrb.train.engines import Engine, EngineWeights, Trajectory, VLLMEngine
from redrb.train.episodes import EpisodeMaker
from tests.real_engines.conftest import PROMPT, VLLM, RealVLLM, log_probs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not VLLM, reason="needs VLLM: a folder with bin/vllm and model"),
]

TOLERANCE = 0.1
"""Of bfloat16, computed in two ways. Log-probabilities of two policies differ by 1 and more."""


@pytest.fixture
def client() -> Iterator[Client]:
    with redrb.connect("embedded://") as client:
        yield client


def check(items: list[BufferItem], policies: dict[int, PreTrainedModel]) -> set[int]:
    """Compare each token with the version that it names; returns these versions."""
    seen: set[int] = set()
    for item in items:
        assert item.sequences is not None
        assert item.token_versions is not None
        assert item.action_log_probs is not None
        tokens = item.sequences.tolist()
        for version in set(item.token_versions.tolist()):
            chosen = item.token_versions == version
            expected = log_probs(policies[version], tokens)[chosen]
            difference = (item.action_log_probs[chosen] - expected).abs()
            assert difference.mean() < TOLERANCE, (version, difference.tolist())
            seen.add(version)
    return seen


async def episode(prompt: Any, engine: Engine) -> BufferItem:
    trajectory = Trajectory(PROMPT)
    trajectory.sampled(await engine.generate(trajectory.tokens, max_new_tokens=48))
    return trajectory.item(reward=1.0, extras={"number": prompt})


def test_samples_name_the_right_weights_through_updates_and_kills(
    vllm: RealVLLM, client: Client, namespace: str, tmp_path: Path
) -> None:
    policies = {version: vllm.policy(version) for version in range(1, 6)}
    publisher = redrb.WeightPublisher(client, "trainer_0", namespace=namespace)

    def publish(version: int) -> None:
        state = {f"actor.{name}": each for name, each in policies[version].state_dict().items()}
        publisher.publish(state, version=version)

    publish(1)
    engine = VLLMEngine(vllm.url, model=str(vllm.model))
    weights = EngineWeights(client, "trainer_0", engine, tmp_path, namespace=namespace)
    begun = [0]
    ended = threading.Event()

    def numbers() -> Iterator[int]:
        while not ended.is_set() and begun[0] < 5000:
            begun[0] += 1
            yield begun[0]

    def sample_with(version: int) -> None:
        """Wait until some groups were begun with a version."""
        ends, groups = time.monotonic() + 120, None
        while time.monotonic() < ends and (groups is None or begun[0] < groups):
            threading.Event().wait(0.2)
            if groups is None and engine.version == version:
                groups = begun[0] + 20

    def disturb() -> None:
        try:
            for version in policies:
                if version > 1:
                    publish(version)
                sample_with(version)
                if version % 2:
                    vllm.kill()
                    vllm.start()
                    sample_with(version)
        finally:
            ended.set()

    disturbing = threading.Thread(target=disturb)
    disturbing.start()
    with ExperienceStream(client, "math", namespace=namespace) as stream:
        stream.join_group()
        maker = EpisodeMaker(stream, episode, engine, weights=weights, group_size=1, groups=8)
        maker.run(numbers())
        disturbing.join()
        assert stream.stats().ledger.filtered == 0
        with stream.take(stream.count(), timeout=0) as lease:
            items = [item for group in lease.groups() for item in group]
    assert sorted(item.extras["number"] for item in items) == list(range(1, begun[0] + 1))
    assert check(items, policies) == {1, 2, 3, 4, 5}
