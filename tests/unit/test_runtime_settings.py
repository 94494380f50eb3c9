"""Settings of trainers and makers: refused where they cannot be used, and where checkpoints go."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import redrb
from redrb import (
    ConfigError,
    DetachedTrainer,
    Experience,
    ExperienceMakerHolder,
    ExperienceStream,
)
from redrb.compat.coati.performance import parameters_of
from redrb.connection.stop import Stop
from redrb.train.checkpoint import Checkpoints, Position
from redrb.train.strategy import Strategy, place_models
from redrb.train.trainer import Trainer


class Idle(Trainer):
    """Trains nothing."""

    def training_step(self, experience: Experience) -> dict[str, Any]:
        return {}

    def send_weights(self) -> None:
        """Send nothing."""


@pytest.fixture
def make(namespace: str) -> Iterator[Callable[..., Idle]]:
    with redrb.connect(f"fake://{namespace}") as client:
        yield lambda **options: Idle(client, ExperienceStream(client, "math"), 2, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"checkpoint_every": 0}, "checkpoint_every=0.*at least 1"),
        ({"ack": "later", "checkpoint_dir": "checkpoints"}, "ack="),
        ({"ack": "checkpoint"}, "checkpoint_dir"),
        ({"rank": 1}, "world_size"),
        ({"step_limit": -1}, "step_limit=-1"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    make: Callable[..., Idle], options: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**options)


def test_each_rank_has_a_directory_of_checkpoints(tmp_path: Path) -> None:
    for rank in (None, 1):
        Checkpoints.of_rank(tmp_path, "me", rank).save({}, Position(step=1), {})
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.pt")) == [
        "checkpoint-1.pt",
        "rank-1/checkpoint-1.pt",
    ]


@pytest.mark.parametrize("trainers", [[], "trainer_0", ["a b"]])
def test_a_maker_needs_a_list_of_trainers(trainers: Any) -> None:
    with pytest.raises(ConfigError, match="trainer"):
        ExperienceMakerHolder(trainers, Strategy, lambda: (None, None, None, None))


def test_models_are_placed_and_counted() -> None:
    def reward(_: object) -> list[float]:
        return []

    placed, _ = place_models(
        lambda: None, lambda: (nn.Linear(2, 3), None, reward), None, device="cpu"
    )
    assert [*map(parameters_of, placed)] == [9, 0, 0]
    assert placed[1:] == (None, reward)
    [alone], _ = place_models(lambda: Strategy("cpu"), lambda: nn.Linear(1, 1), None)
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


@pytest.mark.parametrize(
    ("base", "hook"),
    [(DetachedTrainer, "_on_batch_end"), (ExperienceMakerHolder, "_on_send_end")],
)
def test_a_hook_of_coati_that_nothing_would_call_is_refused(base: type, hook: str) -> None:
    with pytest.raises(ConfigError, match=rf"Mine\.{hook} would not be called.*callbacks="):
        type("Mine", (base,), {hook: print})
    mixin = type("Mixin", (), {hook: print})
    with pytest.raises(ConfigError, match=rf"Mine\.{hook}"):
        type("Mine", (mixin, base), {})
