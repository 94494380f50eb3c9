"""Checkpoints: written whole, everything is restored, no code in them is run."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import redrb
from redrb import BufferItem, make_experience_batch
from redrb.cli.processes.lifetime import exit_status
from redrb.errors import CheckpointFailed, ConfigError, DecodeError
from redrb.train.checkpoint import Checkpoints, Position, stateful_parts
from redrb.train.engines import EngineWeights
from tests.disks import fill, read_only, small_disk


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
    position = Position(0, 2, 1, 3, 11, 7, [2, 0, 1], [kept])
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
    assert torch.equal(found.kept[0].sequences, kept.sequences)
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
    at = datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC)
    kept.extras = [{"deep": deepest, "many": [[]] * 200_000, "at": [at, float("inf")]}] * 2
    checkpoints = Checkpoints(tmp_path, owner="me")
    checkpoints.save({}, Position(step=1, kept=[kept]), {})
    restored = checkpoints.load(1, {})[0].kept[0].extras
    assert restored == kept.extras
    path = tmp_path / "checkpoint-1.pt"
    content = torch.load(path, weights_only=True)
    nested, many = b"\x91" * 66 + b"\xc0", b"\xdd\x00\x10\x00\x00" + b"\x90" * (1 << 20)
    for packed in (nested, b"\x91" * 1000 + b"\xc0", many):
        meta = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        content["position"]["kept"][0]["meta"] = meta
        torch.save(content, path)
        with pytest.raises(DecodeError, match=r"checkpoint-1\.pt is not valid .* more than"):
            checkpoints.load(1, {})


class NoTrainer(redrb.DetachedTrainer):
    def training_step(self, experience: redrb.Experience) -> Mapping[str, Any]:
        raise NotImplementedError

    def _update_remote_makers(self, fully_update: bool = False, **config: Any) -> None:
        raise NotImplementedError


def save(client: redrb.Client, folder: Path) -> None:
    Checkpoints(folder, owner="me").save({}, Position(), {})


def start(client: redrb.Client, folder: Path) -> None:
    NoTrainer([], client=client, checkpoint_dir=folder)


def start_rank(client: redrb.Client, folder: Path) -> None:
    NoTrainer([], client=client, checkpoint_dir=folder, rank=0, world_size=2)


def give_weights(client: redrb.Client, folder: Path) -> None:
    engine: Any = None  # it gets nothing
    EngineWeights(client, "actor", engine, folder)


USES = [save, start, start_rank, give_weights]


@pytest.mark.parametrize("use", USES)
def test_a_directory_that_cannot_be_written_is_named_at_the_start(
    use: Callable[[redrb.Client, Path], None], tmp_path: Path
) -> None:
    folder = tmp_path / "file" / "run"
    with redrb.connect(f"fake://{tmp_path.name}") as client:
        use(client, tmp_path / "run")
        left = [path for path in (tmp_path / "run").rglob("*") if not path.is_dir()]
        assert len(left) == (use is save)
        folder.parent.write_text("")
        with pytest.raises(ConfigError, match=r"can(not)? be written") as caught:
            use(client, folder)
    assert str(folder) in str(caught.value)
    assert exit_status(caught.value) == 2  # `redrb run` starts the trainer no more


def test_a_disk_that_is_full_or_read_only_costs_one_checkpoint(tmp_path: Path) -> None:
    large = {"model": nn.Linear(1000, 1000)}
    small = {"model": nn.Linear(10, 10)}
    with small_disk(tmp_path / "disk", "1m") as disk:
        checkpoints = Checkpoints(disk / "run", owner="me")
        checkpoints.save(small, Position(step=1), {})
        kept = sorted(path.name for path in (disk / "run").iterdir())
        with pytest.raises(CheckpointFailed, match=r"No space .*checkpoint-1\.pt") as caught:
            checkpoints.save(large, Position(step=2), {})
        assert exit_status(caught.value) == 1  # `redrb run` starts the trainer again
        assert sorted(path.name for path in (disk / "run").iterdir()) == kept
        filler = fill(disk)
        with pytest.raises(CheckpointFailed, match="No space left"):
            checkpoints.save(small, Position(step=2), {})
        filler.unlink()
        with read_only(disk), pytest.raises(CheckpointFailed, match="Read-only") as caught:
            checkpoints.check()
        with read_only(disk), pytest.raises(CheckpointFailed, match=r"Read-only .*begins anew"):
            Checkpoints(disk / "other", owner="me").check()
        assert exit_status(caught.value) == 1
        assert checkpoints.load(1, small)[0].step == 1
        checkpoints.save(small, Position(step=2), {})
        assert checkpoints.steps() == [2]


def test_two_writers_of_one_directory_write_whole_files(tmp_path: Path) -> None:
    parts = {"model": nn.Linear(200, 200)}
    writers = [Checkpoints(tmp_path, owner="me", keep=2) for _ in range(2)]

    def write(number: int) -> None:
        for step in range(20):
            writers[number].save(parts, Position(step=1000 + 2 * step + number), {})

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(write, range(2)))
    steps = writers[0].steps()
    assert steps[-1] == 1039
    assert writers[0].load(steps[-1], parts)[0].step == 1039
    assert {path.suffix for path in tmp_path.iterdir()} == {".pt"}


def test_another_optimizer_is_refused_by_name(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    checkpoints = Checkpoints(tmp_path, owner="me")
    checkpoints.save({"optimizer": torch.optim.AdamW(model.parameters())}, Position(step=1), {})
    with pytest.raises(ConfigError, match=r"holds optimizer of AdamW, and this trainer has SGD"):
        checkpoints.load(1, {"optimizer": torch.optim.SGD(model.parameters(), momentum=0.9)})


def test_another_scheduler_is_refused_by_name(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)
    checkpoints = Checkpoints(tmp_path, owner="me")
    before = {"rate": torch.optim.lr_scheduler.StepLR(optimizer, 10)}
    checkpoints.save(before, Position(step=1), {})
    now = {"rate": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)}
    with pytest.raises(ConfigError, match=r"holds rate of StepLR, .* has CosineAnnealingLR"):
        checkpoints.load(1, now)
