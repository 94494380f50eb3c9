"""Rollouts of a `ReplayBuffer` that streams, loaders, ranks and trainers take as samples."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch

from redrb import (
    BufferItem,
    Client,
    ConfigError,
    DetachedTrainer,
    Experience,
    ExperienceLoader,
    ExperienceStream,
    Mixture,
)
from redrb.compat.xtuner import ReplayBuffer, RolloutReader, rollout_sample
from redrb.errors import RecordError
from tests.samples import numbered


def rollout(number: int, length: int = 2, **fields: Any) -> dict[str, Any]:
    return {
        "group_id": number,
        "prompt_ids": [1] * number,
        "response_ids": [7] * length,
        "logprobs": [-0.5] * length,
        "response_mask": [1] * (length - 1) + [0],
        "reward": {"score": float(number)},
        "response_model_steps": [3] * (length - 1) + [4],
        **fields,
    }


@pytest.fixture
def fill(client: Client, namespace: str) -> Callable[..., None]:
    def put(*groups: list[dict[str, Any]]) -> None:
        async def main() -> None:
            async with ReplayBuffer(client, namespace=namespace) as buffer:
                for group in groups:
                    await buffer.put(group, "math")

        asyncio.run(main())

    return put


@pytest.fixture
def opened(client: Client, namespace: str) -> Iterator[Callable[..., ExperienceStream]]:
    with ExitStack() as scope:

        def made(**options: Any) -> ExperienceStream:
            options = {"group": "replay", "namespace": namespace, **options}
            return scope.enter_context(ExperienceStream(client, "math", **options))

        yield made


def test_a_stream_and_a_loader_read_rollouts_as_experience(
    fill: Callable[..., None], opened: Callable[..., ExperienceStream]
) -> None:
    fill([rollout(1), rollout(2, 3)], [rollout(3), rollout(4)])
    stream = opened(reader=RolloutReader())
    with stream.take(1) as lease:
        batch = lease.batch()
        assert lease.policy_versions == [3, 3]
    assert batch.sequences.tolist() == [[0, 0, 1, 7, 7], [1, 1, 7, 7, 7]]  # type: ignore[union-attr]
    assert batch.attention_mask.tolist() == [[0, 0, 1, 1, 1], [1] * 5]  # type: ignore[union-attr]
    assert batch.action_log_probs.tolist() == [[0, -0.5, -0.5], [-0.5] * 3]  # type: ignore[union-attr]
    assert batch.action_mask.tolist() == [[False, True, False], [True, True, False]]  # type: ignore[union-attr]
    assert batch.reward.tolist() == [1, 2]  # type: ignore[union-attr]
    assert batch.token_versions.tolist() == [[-1, 3, 4], [3, 3, 4]]  # type: ignore[union-attr]
    with ExperienceLoader(stream, 1, steps=1, timeout=10) as loader:
        assert [batch.reward.tolist() for batch in loader] == [[3, 4]]  # type: ignore[union-attr]
    assert stream.stats().ledger.acked == 2


def test_ranks_a_trainer_and_a_mixture_read_rollouts(
    fill: Callable[..., None],
    opened: Callable[..., ExperienceStream],
    client: Client,
    namespace: str,
) -> None:
    class Trainer(DetachedTrainer):
        rewards: list[float]

        def training_step(self, experience: Experience) -> dict[str, Any]:
            self.rewards = experience.reward.tolist()  # type: ignore[union-attr]
            return {}

        def _update_remote_makers(self, fully_update: bool = False, **config: Any) -> None:
            pass

    fill(*([rollout(number)] for number in range(1, 7)))
    options: dict[str, Any] = {"namespace": namespace, "group": "replay", "reader": RolloutReader()}
    with Trainer([], 2, task="math", client=client, timeout=10, **options) as trainer:
        trainer.fit(1, 1)
        assert trainer.rewards == [1, 2]
    with Mixture(client, {"math": 1}, **options) as mixture, mixture.take(2) as lease:
        assert lease.batch().reward.tolist() == [3, 4]  # type: ignore[union-attr]
    taken: dict[int, list[float]] = {}

    def rank(number: int) -> None:
        stream = opened(reader=RolloutReader())
        with stream.take(2, timeout=10, rank=number, world_size=2, step=0) as lease:
            taken[number] = lease.batch().reward.tolist()  # type: ignore[union-attr]

    threads = [Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(taken[0] + taken[1]) == [5, 6]


def test_a_stream_never_moves_rollouts_to_the_dead_letters(
    fill: Callable[..., None], opened: Callable[..., ExperienceStream]
) -> None:
    fill([rollout(1)], [rollout(2, logprobs=None)], [rollout(3)])
    plain, reading = opened(), opened(reader=RolloutReader())
    for _ in range(7):  # more often than max_deliveries
        with pytest.raises(ConfigError, match="put by a ReplayBuffer"):
            plain.take(1, timeout=5)
        with pytest.raises(RecordError) as caught, reading.take(3, timeout=5) as lease:
            lease.batch()
        assert "reject these groups" in "".join(caught.value.__notes__)
    refusing = opened(reader=RolloutReader(lambda _: rollout_sample({})))
    with pytest.raises(RecordError, match="group 1 cannot be read as samples"):
        refusing.take(1, timeout=5)
    refusing.close()
    ledger = reading.stats().ledger
    assert (ledger.waiting, ledger.leased, ledger.dead) == (3, 0, 0)
    reading.put(numbered(5), policy_version=1)
    with reading.take(4, timeout=5) as lease:
        assert len(lease.groups()) == 4


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"prompt_ids": None}, "prompt_ids"),
        ({"response_ids": []}, "no response_ids"),
        ({"logprobs": [0.0]}, "logprobs is of shape"),
        ({"response_mask": [1]}, "response_mask is 1 entries"),
        ({"response_model_steps": [1]}, "response_model_steps"),
        ({"reward": "good"}, "reward is 'good'"),
        ({"mm_info": [1]}, "mm_info is"),
        ({"mm_info": {"pixel_values": np.array(["a"])}}, "mm_info holds no array"),
        ({"mm_info": {"reward": np.ones(1)}}, "'reward', as a field of samples is named"),
        ({"mm_info": {"routed_experts": np.ones(1)}}, "'routed_experts', as a field"),
        ({"routed_experts": "all"}, "routed_experts holds no array"),
        ({"routed_experts": [np.ones((1, 2)), np.ones((1, 3))]}, "routed_experts holds no array"),
        ({"input_ids": [1, 2]}, "labels is None"),
        ({"input_ids": [1, 2], "labels": [1]}, "labels is of shape"),
        ({"input_ids": [1, 2], "labels": [1, -100]}, "labels of a rollout hold no token"),
        ({"input_ids": [1, 2], "labels": [1, 2], "logprobs": [0.0]}, "logprobs is of shape"),
    ],
)
def test_rollouts_that_are_no_samples_are_named(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(RecordError, match=said):
        rollout_sample(rollout(1, **fields))


def test_missing_fields_may_be_missing() -> None:
    item: BufferItem = rollout_sample({"prompt_ids": [1], "response_ids": [2, 3], "reward": 2})
    assert item.sequences.tolist() == [1, 2, 3]  # type: ignore[union-attr]
    assert item.action_mask.tolist() == [True, True]  # type: ignore[union-attr]
    assert torch.equal(item.reward, torch.tensor(2.0))  # type: ignore[arg-type]
    assert item.token_versions is None


def test_images_and_routed_experts_become_tensors() -> None:
    experts = np.arange(6).reshape(3, 2)
    pixels, grid = np.ones((4, 3), np.float32), torch.tensor([[1, 2, 2]])
    info = {"pixel_values": pixels, "image_grid_thw": grid, "num_img_tokens": [4], "audio": None}
    item = rollout_sample(rollout(1, mm_info=info, routed_experts=experts))
    assert item.tensors["pixel_values"].tolist() == pixels.tolist()
    assert item.tensors["image_grid_thw"] is grid
    assert item.tensors["routed_experts"].tolist() == experts.tolist()
    assert item.extras == {"mm_info": {"num_img_tokens": [4]}}
    trace = rollout_sample(rollout(1, routed_experts=[experts, experts[:1]]))
    assert trace.tensors["routed_experts"].tolist() == [[2, 3], [4, 5], [0, 1]]


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32, torch.uint8, torch.int16])
def test_routed_experts_of_a_trace_keep_their_type(kind: torch.dtype) -> None:
    parts = [torch.arange(4).to(kind).reshape(2, 2), torch.arange(2).to(kind).reshape(1, 2)]
    got = rollout_sample(rollout(1, routed_experts=parts)).tensors["routed_experts"]
    assert torch.equal(got, torch.cat(parts)[1:])
    assert got.dtype is kind


@pytest.mark.parametrize("first", [-100, 5])
def test_a_trace_is_read_from_its_input_ids_and_labels(first: int) -> None:
    trace: dict[str, Any] = {"input_ids": [5, 6, 7, 8, 9], "labels": [first, -100, 7, -100, 9]}
    item = rollout_sample({**trace, "logprobs": [0.0, 0.0, -0.5, 0.0, -0.25], "reward": 1})
    assert item.sequences.tolist() == [5, 6, 7, 8, 9]  # type: ignore[union-attr]
    assert item.action_mask.tolist() == [True, False, True]  # type: ignore[union-attr]
    assert item.action_log_probs.tolist() == [-0.5, 0, -0.25]  # type: ignore[union-attr]
    bare = rollout_sample({**trace, "response_model_steps": [3, 4]})
    assert (bare.action_log_probs, bare.token_versions, bare.policy_version) == (None, None, 3)
    whole = rollout_sample({**trace, "response_model_steps": [3, 4, 4]})
    assert whole.token_versions.tolist() == [3, 4, 4]  # type: ignore[union-attr]


def test_stale_tokens_are_masked_but_not_in_groups_with_a_trace(
    fill: Callable[..., None], opened: Callable[..., ExperienceStream]
) -> None:
    trace = {"input_ids": [5, 6], "labels": [-100, 6], "logprobs": [0.0, -1.0]}
    steps = [1, 3, 4]
    fill(
        [
            rollout(1, 3, response_model_steps=steps),
            rollout(1, 3, response_model_steps=steps, response_mask=None),
        ],
        [rollout(2, 3, response_model_steps=steps), trace],
    )
    reader = RolloutReader(token_stale_threshold=3, train_step=lambda: 7)
    with opened(reader=reader).take(2) as lease:
        masks = [[item.action_mask.tolist() for item in group] for group in lease.groups()]  # type: ignore[union-attr]
    assert masks == [
        [[False, False, False], [False, False, True]],
        [[True, True, False], [True]],
    ]
    for wrong in ({"token_stale_threshold": 1}, {"train_step": int}):
        with pytest.raises(ConfigError, match="give both"):
            RolloutReader(**wrong)
    with pytest.raises(ConfigError, match="token_stale_threshold"):
        RolloutReader(token_stale_threshold=0, train_step=int)
