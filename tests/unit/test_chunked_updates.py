"""Updates of a maker's models: chunks are collected, and loaded under the lock."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from redrb.compat.coati.updates import ChunkedUpdates
from redrb.errors import WeightError, WeightMismatch
from redrb.train.following import LockedModels
from redrb.weights import LoraConfig
from redrb.weights.tensors.names import models_tensors

NONE: dict[str, Any] = {"actor": None, "critic": None, "reward": None}


class Updated(LockedModels):
    """Models, and the updates of them."""

    def __init__(self, models: dict[str, nn.Module | None]) -> None:
        super().__init__(models)
        self.update = ChunkedUpdates(self).update


def models() -> Updated:
    actor, critic = nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        actor.weight.zero_()
        critic.weight.zero_()
    return Updated({"actor": actor, "critic": critic, "reward": None})


def weights(updates: Updated) -> list[float]:
    tensors = models_tensors(updates.models)
    return [float(tensor.detach().mean()) for tensor in tensors.values()]


def change(updates: Updated, *ends: str, **states: dict[str, torch.Tensor]) -> bool:
    return updates.update(states, NONE, first="first" in ends, last="last" in ends)


def test_nothing_changes_before_the_end_of_an_update() -> None:
    updates = models()
    assert not change(updates, "first", actor={"weight": torch.ones(2, 2)})
    with updates.exclusive():  # generation goes on
        assert weights(updates) == [0, 0]
    assert not change(updates, critic={"weight": torch.ones(1, 2), "not there": torch.ones(3)})
    assert weights(updates) == [0, 0]
    assert change(updates, "last")
    assert weights(updates) == [1, 1]
    assert not updates.lock.locked()


def test_the_tensors_of_a_chunk_may_be_used_again_at_once() -> None:
    updates = models()
    chunk = torch.ones(2, 2)
    change(updates, "first", actor={"weight": chunk})
    chunk.zero_()
    change(updates, "last")
    assert weights(updates) == [1, 0]


def test_an_update_waits_for_generation() -> None:
    updates = models()
    with ThreadPoolExecutor(1) as pool:
        with updates.exclusive():
            updated = pool.submit(change, updates, actor={"weight": torch.ones(2, 2)})
            with pytest.raises(TimeoutError):
                updated.result(0.05)
            assert weights(updates) == [0, 0]
        assert updated.result(20)
    assert weights(updates) == [1, 0]


def test_an_update_that_was_not_ended_gets_into_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    updates = models()
    change(updates, "first", actor={"weight": torch.ones(2, 2)})
    with ThreadPoolExecutor(1) as other:  # as does another thread's
        state = {"weight": torch.full((1, 2), 3.0)}
        other.submit(change, updates, "first", critic=state).result(20)
        change(updates, "first", critic={"weight": torch.ones(1, 2)})
        change(updates, "last")
        assert weights(updates) == [0, 1]
        assert "was not ended, and another one begins" in caplog.text
        with pytest.raises(WeightError, match="no update is under way"):
            change(updates, "last")
        other.submit(change, updates, "last").result(20)
    assert weights(updates) == [0, 3]


def test_an_update_that_does_not_fit_changes_nothing() -> None:
    updates = models()
    change(updates, "first", actor={"weight": torch.ones(2, 2)})
    change(updates, critic={"weight": torch.ones(7, 2)})
    with pytest.raises(WeightMismatch, match="Nothing was loaded"):
        change(updates, "last")
    assert weights(updates) == [0, 0]
    assert not updates.lock.locked()
    with pytest.raises(WeightError, match="has no reward"):
        change(updates, "first", reward={})
    for ends in ((), (), ("last",)):  # the rest of the update
        with pytest.raises(WeightError, match="no update is under way"):
            change(updates, *ends, actor={"weight": torch.ones(2, 2)})
    assert change(updates, actor={"weight": torch.ones(2, 2)})
    assert weights(updates) == [1, 0]


def test_lora_is_merged_and_a_full_update_is_a_new_base() -> None:
    updates = Updated({"actor": nn.Sequential(nn.Linear(2, 2, bias=False))})
    lora = {"0.lora_A": torch.ones(1, 2), "0.lora_B": torch.ones(2, 1)}
    configs = {"actor": {"0": LoraConfig(1, 1.0)}}
    for base in (0.0, 5.0):
        change(updates, actor={"0.weight": torch.full((2, 2), base)})
        for _ in range(3):
            updates.update({"actor": lora}, configs, first=False, last=False)
            assert weights(updates) == [base + 1]


def test_lora_is_merged_into_the_weights_that_a_trainer_has_published_meanwhile() -> None:
    actor = nn.Sequential(nn.Linear(2, 2, bias=False))
    updates = Updated({"actor": actor})
    lora = {"0.lora_A": torch.ones(1, 2), "0.lora_B": torch.ones(2, 1)}
    for base in (1.0, 5.0):
        nn.init.constant_(actor[0].weight, base)
        updates.loads += 1
        updates.update(
            {"actor": lora}, {"actor": {"0": LoraConfig(1, 1.0)}}, first=False, last=False
        )
        assert weights(updates) == [base + 1]


class Compiled(nn.Module):
    """A module as torch.compile wraps one; the real thing takes seconds to import."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._orig_mod = inner


def test_the_model_inside_a_wrapper_is_updated() -> None:
    inner = nn.Linear(2, 2, bias=False)
    updates = Updated({"actor": Compiled(Compiled(inner))})
    assert updates.models == {"actor": inner}
