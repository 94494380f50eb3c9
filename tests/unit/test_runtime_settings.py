"""Settings of trainers and makers: refused where they cannot be used, and where checkpoints go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from redrb import ConfigError
from redrb.connection.stop import Stop
from redrb.runtime.checkpoint import Position
from redrb.runtime.maker_settings import SendSettings
from redrb.runtime.model_placement import place_models
from redrb.runtime.strategy import Strategy
from redrb.runtime.trainer_settings import BatchSettings, CheckpointSettings


def batches(rank: int | None = None, world_size: int | None = None) -> BatchSettings:
    return BatchSettings(torch.device("cpu"), False, 1, None, rank, world_size)


def sending(trainers: Any) -> SendSettings:
    return SendSettings(trainers, True, 256, 20.0, {})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("step", None, 0), "checkpoint_every=0.*at least 1"),
        (("later", "checkpoints", 1), "ack="),
        (("checkpoint", None, 1), "checkpoint_dir"),
    ],
)
def test_bad_settings_of_checkpoints_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CheckpointSettings(*settings)


def test_rank_and_world_size_come_together() -> None:
    assert "rank" not in batches().loader_options(3)
    assert batches(1, 2).loader_options(3)["first_step"] == 3
    with pytest.raises(ConfigError, match="world_size"):
        batches(1)


def test_ranks_lease_a_bounded_number_of_steps_between_two_checkpoints(tmp_path: Path) -> None:
    settings = CheckpointSettings("checkpoint", tmp_path, 2)
    settings.check_limits(1000, batches())
    settings.check_limits(31, batches(0, 2))
    CheckpointSettings("step", tmp_path, 2).check_limits(1000, batches(0, 2))
    with pytest.raises(ConfigError, match="at most 64 steps"):
        settings.check_limits(32, batches(0, 2))


def test_each_rank_has_a_directory_of_checkpoints(tmp_path: Path) -> None:
    assert CheckpointSettings("step", None, 1).open("me", 1) is None
    for rank in (None, 1):
        checkpoints = CheckpointSettings("step", tmp_path, 1).open("me", rank)
        checkpoints.save({}, Position(step=1), {})
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.pt")) == [
        "checkpoint-1.pt",
        "rank-1/checkpoint-1.pt",
    ]


@pytest.mark.parametrize("trainers", [[], "trainer_0", ["a b"]])
def test_a_maker_needs_a_list_of_trainers(trainers: Any) -> None:
    with pytest.raises(ConfigError, match="trainer"):
        sending(trainers)


def test_models_are_placed_and_counted() -> None:
    def reward(_: object) -> list[float]:
        return []

    placed = place_models(lambda: None, lambda: (nn.Linear(2, 3), None, reward), None, device="cpu")
    assert placed.parameters == (9, 0, 0)
    assert placed.models[1:] == (None, reward)
    [alone] = place_models(lambda: Strategy("cpu"), lambda: nn.Linear(1, 1), None).models
    assert isinstance(alone, nn.Linear)
    with pytest.raises(ConfigError, match="host"):
        place_models(lambda: None, lambda: nn.Linear(1, 1), {"host": "x"})


def test_the_first_request_to_stop_counts_and_ends_waits() -> None:
    request, woken = Stop(), []
    assert not request
    with request.waking(lambda: woken.append(request.reason)):
        request.ask("first")
        request.ask("second")
    assert (request.reason, woken) == ("first", ["first"])
    assert request.wait(60)
