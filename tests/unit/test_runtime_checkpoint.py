"""Checkpoints: written whole, everything is restored, no code in them is run."""

from __future__ import annotations

import pickle
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from redrb import BufferItem, make_experience_batch
from redrb.errors import ConfigError, DecodeError
from redrb.runtime.checkpoint import Checkpoints, Position, stateful_parts


class Trainer:
    def __init__(self) -> None:
        self.model = nn.Linear(3, 3)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.name = "no state"

    def step(self) -> None:
        self.model(torch.randn(2, 3)).sum().backward()
        self.optimizer.step()
        self.schedule.step()


def batch() -> object:
    items = [
        BufferItem(
            sequences=torch.arange(length),
            action_log_probs=torch.randn(2),
            values=torch.randn(2),
            reward=torch.tensor(1.0),
            kl=torch.randn(2),
            advantages=torch.randn(2),
            attention_mask=torch.ones(length, dtype=torch.int64),
            policy_version=3,
        )
        for length in (4, 6)
    ]
    return make_experience_batch(items)


def test_all_contents_are_restored(tmp_path: Path) -> None:
    trainer, other = Trainer(), Trainer()
    trainer.step()
    kept = batch()
    position = Position(0, 2, 1, 3, 11, 7, [2, 0, 1], [kept])  # type: ignore[list-item]
    unacked = {"a1": {5: 1, 9: 4}, "b2": {5: 2}}
    checkpoints = Checkpoints(tmp_path / "run", owner="me")
    checkpoints.save(stateful_parts(trainer), position, unacked)
    drawn = (torch.rand(3), random.random(), np.random.rand())
    torch.rand(5)
    assert checkpoints.steps() == [11]
    found, found_unacked = checkpoints.load(11, stateful_parts(other))
    assert found_unacked == unacked
    assert (found.episode, found.epoch, found.batch, found.step, found.taken) == (2, 1, 3, 11, 7)
    assert found.order == [2, 0, 1]
    assert torch.equal(found.kept[0].sequences, kept.sequences)  # type: ignore[attr-defined, arg-type]
    assert found.kept[0].policy_version == [3, 3]
    assert torch.equal(torch.rand(3), drawn[0])
    assert (random.random(), np.random.rand()) == drawn[1:]
    for one, two in zip(trainer.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(one, two)
    assert other.schedule.last_epoch == 1
    assert other.optimizer.state_dict()["state"].keys() == {0, 1}


def test_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, owner="me", keep=2)
    assert checkpoints.steps() == []
    for step in (1, 5, 12, 100):
        checkpoints.save({}, Position(step=step), {})
    assert checkpoints.steps() == [12, 100]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoint-100.pt",
        "checkpoint-12.pt",
    ]


def test_a_checkpoint_of_another_trainer_is_refused(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, owner="me")
    checkpoints.save(stateful_parts(Trainer()), Position(step=1), {})
    with pytest.raises(ConfigError, match="model"):
        checkpoints.load(1, {})


class Bomb:
    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (Path("exploded"),))


def test_damaged_files_are_refused_and_nothing_in_them_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoints = Checkpoints(tmp_path, owner="me")
    checkpoints.save({}, Position(step=1), {})
    path = tmp_path / "checkpoint-1.pt"
    whole = path.read_bytes()
    for content in (b"", b"text", whole[:100], whole[: len(whole) // 2], pickle.dumps(Bomb(), 2)):
        path.write_bytes(content)
        with pytest.raises(DecodeError, match=r"checkpoint-1\.pt"):
            checkpoints.load(1, {})
    torch.save({"format": 99}, path)
    with pytest.raises(DecodeError, match="format 99"):
        checkpoints.load(1, {})
    assert not Path("exploded").exists()


def test_metadata_has_the_limits_of_groups(tmp_path: Path) -> None:
    deepest: object = None
    for _ in range(62):  # as deep as a put allows
        deepest = [deepest]
    kept = batch()
    kept.extras = [{"deep": deepest, "many": [[]] * 200_000}] * 2  # type: ignore[attr-defined]
    checkpoints = Checkpoints(tmp_path, owner="me")
    checkpoints.save({}, Position(step=1, kept=[kept]), {})  # type: ignore[list-item]
    restored = checkpoints.load(1, {})[0].kept[0].extras
    assert restored == kept.extras  # type: ignore[attr-defined]
    path = tmp_path / "checkpoint-1.pt"
    content = torch.load(path, weights_only=True)
    nested, many = b"\x91" * 66 + b"\xc0", b"\xdd\x00\x10\x00\x00" + b"\x90" * (1 << 20)
    for packed in (nested, b"\x91" * 1000 + b"\xc0", many):
        meta = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        content["position"]["kept"][0]["meta"] = meta
        torch.save(content, path)
        with pytest.raises(DecodeError, match=r"checkpoint-1\.pt is not valid .* more than"):
            checkpoints.load(1, {})


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="no checkpoint can be written"):
        Checkpoints(tmp_path / "file" / "run", owner="me").save({}, Position(), {})
