"""torchrl's ReplayBuffer on a task."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import redrb
from redrb import ConfigError
from redrb.errors import RecordError

pytest.importorskip("torchrl")
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.data import RandomSampler, ReplayBuffer
from torchrl.modules import QValueActor
from torchrl.objectives import DQNLoss

from redrb.compat.torchrl import TaskSampler, TaskStorage, TaskWriter, task_buffer


@pytest.fixture
def url() -> str:
    return f"fake://{uuid.uuid4().hex}"


@pytest.fixture
def stream(open_stream: Callable[..., redrb.ExperienceStream]) -> redrb.ExperienceStream:
    return open_stream(max_deliveries=3)


@pytest.fixture
def buffer(stream: redrb.ExperienceStream) -> Iterator[Any]:
    made = task_buffer(stream, 4, timeout=5)
    yield made
    made.storage.close()


def transitions(count: int, start: int = 0) -> TensorDict:
    """Return transitions of an environment whose observation is a number."""
    numbers = torch.arange(start, start + count, dtype=torch.float32)[:, None]
    return TensorDict(
        {
            "observation": numbers.repeat(1, 3),
            "action": nn.functional.one_hot(torch.arange(count) % 2, 2),
            "next": {
                "observation": numbers.repeat(1, 3) + 1,
                "reward": numbers,
                "done": torch.zeros(count, 1, dtype=torch.bool),
                "terminated": torch.zeros(count, 1, dtype=torch.bool),
            },
        },
        batch_size=[count],
    )


def test_what_goes_in_comes_out_and_is_acknowledged(
    buffer: Any, stream: redrb.ExperienceStream
) -> None:
    given = transitions(8)
    assert buffer.extend(given).shape == (8,)
    assert len(buffer) == 8
    for start in (0, 4):
        batch = buffer.sample()
        expected = transitions(4, start)
        for key in expected.keys(include_nested=True, leaves_only=True):
            if key != "action":
                assert torch.equal(batch[key], expected[key]), key
        assert batch["policy_version"].tolist() == [-1] * 4
        assert stream.stats().ledger.acked == start
        buffer.storage.ack(batch)
    assert stream.stats().ledger.acked == 8


def test_a_loss_of_torchrl_trains(buffer: Any) -> None:
    torch.manual_seed(0)
    network = TensorDictModule(nn.Linear(3, 2), ["observation"], ["action_value"])
    actor = QValueActor(network, in_keys=["observation"], action_space="one-hot")
    loss = DQNLoss(actor, action_space="one-hot", delay_value=False)
    loss.make_value_estimator(gamma=0.0)
    optimizer = torch.optim.Adam(loss.parameters(), 0.1)
    losses = []
    for _ in range(8):
        buffer.extend(transitions(4))
        batch = buffer.sample()
        value = loss(batch)["loss"]
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        buffer.storage.ack(batch)
        losses.append(value.item())
    assert losses[-1] < losses[0]


def test_groups_of_makers_come_as_tensordicts(stream: redrb.ExperienceStream) -> None:
    buffer = task_buffer(stream, 4, group_size=2, timeout=5)
    for lengths in ((7, 7), (5, 7)):
        for length in lengths:
            tokens = torch.arange(1, length + 1)
            items = [redrb.BufferItem(tokens, torch.zeros(3), reward=torch.tensor(1.0))] * 2
            stream.put(items, policy_version=6)
        batch = buffer.sample()
        assert batch["sequences"].shape == (4, 7)
        counted = [length for length in lengths for _ in range(2)]
        assert batch["attention_mask"].sum(1).tolist() == counted
        assert batch["action_mask"].sum(1).tolist() == [3] * 4
    assert batch["policy_version"].tolist() == [6] * 4
    buffer.storage.reject(batch, "not wanted")
    assert stream.stats().ledger.dead == 2


def test_versions_and_trajectories_are_kept(stream: redrb.ExperienceStream) -> None:
    buffer = task_buffer(stream, 2, timeout=5)
    data = TensorDict({"observation": torch.rand(2, 5, 3)}, batch_size=[2, 5])
    data["policy_version"] = torch.tensor([[4], [7]]).expand(2, 5)
    buffer.extend(data)
    batch = buffer.sample()
    assert batch.batch_size == (2,)
    assert torch.equal(batch["observation"], data["observation"])
    assert batch["policy_version"].tolist() == [4, 7]
    buffer.storage.release(batch)
    assert stream.stats().ledger.waiting == 2


def test_batches_that_are_not_ended_are_requeued(stream: redrb.ExperienceStream) -> None:
    buffer = task_buffer(stream, 1, timeout=5, max_unacknowledged=2)
    buffer.extend(transitions(3))
    buffer.sample()
    second = buffer.sample()
    with pytest.raises(ConfigError, match="max_unacknowledged"):
        buffer.sample()
    buffer.storage.ack(second)
    buffer.storage.close()
    ledger = stream.stats().ledger
    assert (ledger.acked, ledger.waiting, ledger.leased) == (1, 2, 0)


def test_other_buffers_take_the_parts_and_prefetch(stream: redrb.ExperienceStream) -> None:
    storage = TaskStorage(stream, timeout=5)
    buffer = ReplayBuffer(
        storage=storage,
        sampler=TaskSampler(),
        writer=TaskWriter(),
        collate_fn=lambda batch: batch,
        batch_size=2,
        prefetch=1,
    )
    buffer.extend(transitions(4))
    stored = buffer.add(transitions(1)[0])
    assert stored == 5
    batch = buffer.sample()
    storage.ack(batch)
    buffer._prefetch_executor.shutdown()
    storage.close()
    assert stream.stats().ledger.acked == 2
    assert stream.stats().ledger.leased == 0


def test_wrong_use_is_refused_with_advice(buffer: Any, stream: redrb.ExperienceStream) -> None:
    with pytest.raises(ConfigError, match="ExperienceStream"):
        task_buffer("math", 4)
    with pytest.raises(ConfigError, match="at least 1"):
        task_buffer(stream, 0)
    with pytest.raises(ConfigError, match="multiple"):
        task_buffer(stream, 3, group_size=2)
    with pytest.raises(ConfigError, match="sampler"):
        task_buffer(stream, 2, sampler=RandomSampler())
    with pytest.raises(ConfigError, match="TaskStorage"):
        TaskSampler().sample([], 2)
    with pytest.raises(RecordError, match="point"):
        buffer.extend(TensorDict({"a.b": torch.zeros(2)}, batch_size=[2]))
    with pytest.raises(RecordError, match="no rows"):
        TaskStorage(stream).put(TensorDict({"a": torch.zeros(2)}, batch_size=[]))
    with pytest.raises(RecordError, match="TensorDicts"):
        TaskStorage(stream).put([1])
    with pytest.raises(ConfigError, match=r"stream\.clear"):
        buffer.empty()
    with pytest.raises(ConfigError, match=r"buffer\.extend"):
        buffer.storage.set(0, transitions(1))
    with pytest.raises(ConfigError, match=r"buffer\.sample"):
        buffer.storage.get(torch.tensor([1]))
    with pytest.raises(ConfigError, match="was sampled"):
        buffer.storage.ack(transitions(4))


def test_samples_that_do_not_fit_are_failed_deliveries(stream: redrb.ExperienceStream) -> None:
    buffer = task_buffer(stream, 2, timeout=5)
    for length in (2, 3):
        buffer.extend(TensorDict({"observation": torch.zeros(1, length)}, batch_size=[1]))
    with pytest.raises(RecordError, match="one shape"):
        buffer.sample()
    assert stream.stats().ledger.waiting == 2
    TaskStorage(stream, group_size=2).put(TensorDict({"observation": torch.zeros(2, 2)}, [2]))
    with pytest.raises(RecordError, match="group_size=1"):
        task_buffer(stream, 3, timeout=5).sample()
    assert stream.stats().ledger.waiting == 3
