"""Updates of a maker's models: chunks are collected, and the lock is always released."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from redrb.errors import WeightError, WeightMismatch
from redrb.runtime.model_updates import ModelUpdates
from redrb.weights import LoraConfig


def models(timeout_s: float = 20) -> ModelUpdates:
    actor, critic = nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        actor.weight.zero_()
        critic.weight.zero_()
    return ModelUpdates({"actor": actor, "critic": critic, "reward": None}, timeout_s=timeout_s)


def weights(updates: ModelUpdates) -> list[float]:
    return [float(tensor.detach().mean()) for tensor in updates.tensors().values()]


def test_nothing_changes_before_the_end_of_an_update() -> None:
    updates = models()
    updates.begin()
    updates.stage("actor", {"weight": torch.ones(2, 2)}, None)
    assert weights(updates) == [0, 0]
    assert updates.lock.locked()
    updates.stage("critic", {"weight": torch.ones(1, 2), "not there": torch.ones(3)}, None)
    updates.end()
    assert weights(updates) == [1, 1]
    assert not updates.lock.locked()


def test_the_tensors_of_a_chunk_may_be_used_again_at_once() -> None:
    updates = models()
    chunk = torch.ones(2, 2)
    updates.begin()
    updates.stage("actor", {"weight": chunk}, None)
    chunk.zero_()
    updates.end()
    assert weights(updates) == [1, 0]


def test_generation_waits_for_an_update_and_sees_all_of_it() -> None:
    updates = models()
    updates.begin()
    updates.stage("actor", {"weight": torch.ones(2, 2)}, None)
    seen: list[list[float]] = []

    def generate() -> None:
        with updates.exclusive():
            seen.append(weights(updates))

    thread = threading.Thread(target=generate)
    thread.start()
    updates.stage("critic", {"weight": torch.ones(1, 2)}, None)
    updates.end()
    thread.join(20)
    assert seen == [[1, 1]]


def test_a_lost_end_releases_the_lock_and_keeps_the_old_weights(
    caplog: pytest.LogCaptureFixture,
) -> None:
    updates = models(timeout_s=0.2)
    updates.begin()
    updates.stage("actor", {"weight": torch.ones(2, 2)}, None)
    with updates.exclusive():  # free after the timeout
        assert weights(updates) == [0, 0]
    assert "keep their old weights" in caplog.text
    with pytest.raises(WeightError, match="no update is under way"):
        updates.end()
    with pytest.raises(WeightError, match="no update is under way"):
        updates.stage("actor", {"weight": torch.ones(2, 2)}, None)
    updates.begin()
    updates.stage("actor", {"weight": torch.ones(2, 2)}, None)
    updates.end()
    assert weights(updates) == [1, 0]


def test_an_update_that_does_not_fit_changes_nothing() -> None:
    updates = models()
    updates.begin()
    updates.stage("actor", {"weight": torch.ones(2, 2)}, None)
    updates.stage("critic", {"weight": torch.ones(7, 2)}, None)
    with pytest.raises(WeightMismatch, match="Nothing was loaded"):
        updates.end()
    assert weights(updates) == [0, 0]
    assert not updates.lock.locked()
    with pytest.raises(WeightError, match="has no reward"):
        updates.begin()
        updates.stage("reward", {}, None)
    updates.drop()
    assert not updates.lock.locked()


def test_lora_is_merged_and_a_full_update_is_a_new_base() -> None:
    updates = models()
    config = {"": LoraConfig(1, 1.0)}
    actor = nn.Sequential(nn.Linear(2, 2, bias=False))
    updates = ModelUpdates({"actor": actor}, timeout_s=20)
    lora = {"0.lora_A": torch.ones(1, 2), "0.lora_B": torch.ones(2, 1)}
    config = {"0": LoraConfig(1, 1.0)}
    for base in (0.0, 5.0):
        updates.begin()
        updates.stage("actor", {"0.weight": torch.full((2, 2), base)}, None)
        updates.end()
        for _ in range(3):
            updates.begin()
            updates.stage("actor", lora, config)
            updates.end()
            assert weights(updates) == [base + 1]


class Compiled(nn.Module):
    """A module as torch.compile wraps one; the real thing takes seconds to import."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._orig_mod = inner


def test_the_model_inside_a_wrapper_is_updated() -> None:
    inner = nn.Linear(2, 2, bias=False)
    updates = ModelUpdates({"actor": Compiled(Compiled(inner))}, timeout_s=20)
    assert list(updates.tensors()) == ["actor.weight"]
