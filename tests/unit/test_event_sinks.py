"""The events of workers: written for TensorBoard and Weights & Biases."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from typing import Any

import torch

from redrb import Experience
from redrb.cli.processes.event_sinks import open_sinks
from redrb.train import MakerEvents, TrainerEvents
from redrb.watch.metrics.events import TensorBoardLog, WandbLog, numbers_of
from tests.counting_recipe import Counting


def test_only_numbers_become_metrics():
    values = {"a": 1, "b": torch.tensor(0.5), "c": "3", "d": None, "e": math.nan, "f": True}
    values |= {"g": [1, 2], "h": torch.zeros(2), "i": object()}
    assert dict(numbers_of(values)) == {"a": 1.0, "b": 0.5, "f": 1.0}


def experience() -> Experience:
    return Experience(
        sequences=torch.ones(2, 4, dtype=torch.int64),
        action_log_probs=torch.zeros(2, 2),
        values=torch.zeros(2),
        reward=torch.tensor([0.25, 0.75]),
        kl=torch.zeros(2),
        advantages=torch.zeros(2, 2),
        attention_mask=torch.ones(2, 4, dtype=torch.int64),
        action_mask=torch.ones(2, 2, dtype=torch.bool),
    )


def run_callbacks(write: Any) -> None:
    trainer, maker = TrainerEvents(write), MakerEvents(write)
    for loss in (0.5, 0.25):
        trainer.on_batch_start()
        trainer.on_batch_end({"loss": torch.tensor(loss)}, experience())
    maker.on_batch_start()
    maker.on_make_experience_start()
    maker.on_make_experience_end(experience())
    maker.on_send_start()
    maker.on_send_end()
    maker.on_batch_end()


def test_callbacks_write_for_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with TensorBoardLog(tmp_path / "worker") as log:
        run_callbacks(log.write)
    events = EventAccumulator(str(tmp_path / "worker"))
    events.Reload()
    scalars = {tag: [(each.step, each.value) for each in events.Scalars(tag)]
               for tag in ("step/loss", "step/reward", "put/reward", "put/samples")}  # fmt: skip
    assert scalars == {
        "step/loss": [(1, 0.5), (2, 0.25)],
        "step/reward": [(1, 0.5), (2, 0.5)],
        "put/reward": [(1, 0.5)],
        "put/samples": [(1, 2.0)],
    }


def test_a_recipe_writes_for_tensorboard_by_a_setting(tmp_path):
    recipe = Counting(worker="maker-1", tensorboard=str(tmp_path))
    with open_sinks(recipe) as write:
        write("put", step=1, reward=0.5)
    [file] = (tmp_path / "maker-1").iterdir()
    assert b"put/reward" in file.read_bytes()
    with open_sinks(recipe, rank=1):  # only the first rank writes
        pass
    assert len(list((tmp_path / "maker-1").iterdir())) == 1


def stored_records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a file of wandb that is smaller than a block: LevelDB's format."""
    at = 7
    while at + 7 <= len(data):
        _, size, kind = struct.unpack_from("<IHB", data, at)
        assert kind == 1
        yield data[at + 7 : at + 7 + size]
        at += 7 + size


def test_callbacks_write_for_wandb(tmp_path, monkeypatch):
    for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    quick = wandb.Settings(x_disable_stats=True, x_disable_meta=True, console="off")
    with WandbLog("p", name="w", group="n/t", config={"groups": 2}, settings=quick) as log:
        run_callbacks(log.write)
    wandb.teardown()
    [file] = tmp_path.rglob("*.wandb")
    rows, runs = [], []
    for packed in stored_records(file.read_bytes()):
        record = Record.FromString(packed)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({item.key or item.nested_key[0]: item.value_json for item in items})
        elif record.WhichOneof("record_type") == "run":
            runs.append(record.run)
    assert [row["step/loss"] for row in rows if "step/loss" in row] == ["0.5", "0.25"]
    assert [row["trained_steps"] for row in rows] == ["1", "2", "1"]
    assert rows[-1]["put/reward"] == "0.5"
    assert (runs[0].project, runs[0].display_name, runs[0].run_group) == ("p", "w", "n/t")
