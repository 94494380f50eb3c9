"""Rewards in a maker's loop: bad ones cost a group, which is counted; ready groups go first."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from redrb import Client, ExperienceStream, GRPOMakerHolder, Strategy
from redrb.algorithms import Completion, Reward
from tests.networks import TokenNetwork

MakerOf = Callable[..., GRPOMakerHolder]


@pytest.fixture
def stream(client: Client, namespace: str, scope: ExitStack) -> ExperienceStream:
    return scope.enter_context(
        ExperienceStream(
            client,
            "trainer_0",
            namespace=namespace,
            max_staleness=2,
            groups_per_version=4,
            tags={"level": "int"},
        )
    )


@pytest.fixture
def maker(client: Client, namespace: str, scope: ExitStack, stream: ExperienceStream) -> MakerOf:
    stream.advance(0)
    stream.join_group()

    def made(reward: Any) -> GRPOMakerHolder:
        holder = GRPOMakerHolder(
            ["trainer_0"],
            lambda: Strategy("cpu"),
            lambda: (TokenNetwork(8, 8), None, reward, None),
            group_size=2,
            max_new_tokens=2,
            client=client,
            namespace=namespace,
            extras=["answer"],
            tags=["level"],
            policy_version=0,
        )
        return scope.enter_context(holder)

    return made


def prompts() -> list[Any]:
    tokens = torch.tensor([[2], [3], [4], [5]])
    return [{"input_ids": tokens, "answer": list("abcd"), "level": [0, 1, 2, 3]}]


def test_a_bad_reward_is_filtered_and_its_right_returns(
    maker: MakerOf, stream: ExperienceStream, caplog: pytest.LogCaptureFixture
) -> None:
    def reward(completion: Completion) -> float:
        return 1 / completion["level"]

    maker(Reward(reward)).workingloop(prompts)
    stats = stream.stats()
    assert (stats.ledger.put, stats.ledger.filtered) == (4, 1)
    assert stats.admission is not None
    assert (stats.admission.held, stats.admission.used) == (0, 3)
    assert "raised ZeroDivisionError: division by zero" in caplog.text
    with stream.take(1, where={"level": 2}, timeout=5) as lease:
        assert [item.extras for item in lease.items()] == [{"answer": "c"}] * 2


def test_groups_whose_rewards_are_ready_first_are_sent_first(
    maker: MakerOf, stream: ExperienceStream
) -> None:
    gate = threading.Event()

    async def reward(completion: Completion) -> float:
        if completion["answer"] in "ab":
            await asyncio.to_thread(gate.wait, 20)
        return 0.0

    with ThreadPoolExecutor(1) as pool:
        loop = pool.submit(maker(Reward(reward)).workingloop, prompts)
        with stream.take(2, timeout=20) as lease:
            assert {item.extras["answer"] for item in lease.items()} == {"c", "d"}
        gate.set()
        with stream.take(2, timeout=20) as lease:
            assert {item.extras["answer"] for item in lease.items()} == {"a", "b"}
        loop.result(20)
    assert stream.stats().ledger.put == 4
