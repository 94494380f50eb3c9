"""The events of workers: served to Prometheus, written for TensorBoard and Weights & Biases."""

from __future__ import annotations

import math
import re
import struct
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from redrb import ConfigError, Experience
from redrb.environment import child_environment
from redrb.launch.job import Job
from redrb.metrics.events import numbers_of
from redrb.metrics.of_events import EVENT_METRICS
from redrb.metrics.tensorboard import TensorBoardLog
from redrb.metrics.wandb import WandbLog
from redrb.metrics.worker_metrics import LABELS
from redrb.runtime import MakerEvents, TrainerEvents
from redrb.workers.event_sinks import open_sinks
from tests.counting_recipe import Counting
from tests.servers import free_port

ROOT = Path(__file__).parents[2]


def test_only_numbers_become_metrics() -> None:
    values = {"a": 1, "b": torch.tensor(0.5), "c": "3", "d": None, "e": math.nan, "f": True}
    values |= {"g": [1, 2], "h": torch.zeros(2), "i": object()}
    assert dict(numbers_of(values)) == {"a": 1.0, "b": 0.5, "f": 1.0}


def test_a_worker_serves_the_sums_of_its_events() -> None:
    recipe = Counting(worker="w", namespace="n", metrics_port=free_port())
    step = {"step": 1, "groups": 2, "samples": 16, "step_s": 0.5, "actor_loss": torch.tensor(0.3)}
    with open_sinks(recipe) as write:
        write("start")
        write("step", **step)
        write("step", **step | {"step": 2, "step_s": 1.5, "actor_loss": 0.1, "loss": 0.2})
        write("publish", weight_version=7, bytes_sent=100, publish_s=0.25)
        url = f"http://127.0.0.1:{recipe.metrics_port}/metrics"
        with urllib.request.urlopen(url, timeout=5) as response:
            families = list(text_string_to_metric_families(response.read().decode()))
    found = {sample.name: sample for family in families for sample in family.samples}
    labels = dict(zip(LABELS, ("n", "counting", "w", "0"), strict=True))
    assert found["redrb_trainer_steps_total"].labels == labels
    values = {name: sample.value for name, sample in found.items() if name.startswith("redrb_")}
    assert values == {
        "redrb_trainer_steps_total": 2,
        "redrb_trainer_groups_total": 4,
        "redrb_trainer_samples_total": 32,
        "redrb_trainer_step_seconds_sum": 2.0,
        "redrb_trainer_step_seconds_count": 2,
        "redrb_trainer_loss": 0.2,
        "redrb_trainer_version": 7,
        "redrb_trainer_publish_seconds_sum": 0.25,
        "redrb_trainer_publish_seconds_count": 1,
        "redrb_trainer_published_bytes_total": 100,
    }
    assert found["process_resident_memory_bytes"].value > 0


def test_each_rank_and_each_process_of_a_run_has_a_port_of_its_own() -> None:
    recipe = Counting(worker="w", metrics_port=65_535)
    with pytest.raises(ConfigError, match="rank 1 would serve"), open_sinks(recipe, rank=1):
        pass
    job = Job(
        title="run",
        name="counting",
        recipe=Counting(metrics_port=9000),
        given={"metrics_port": 9000},
        makers=2,
        restarts=0,
    )
    ports = [
        next(word for word in job.command(name) if word.startswith("--metrics-port"))
        for name in ("trainer", "maker-1", "maker-2")
    ]
    assert ports == [f"--metrics-port={port}" for port in (9000, 9001, 9002)]


def test_the_document_has_the_table_of_worker_metrics() -> None:
    rows = [f"| `{metric.name}` | {metric.kind} | {metric.help} |" for metric in EVENT_METRICS]
    document = (ROOT / "docs" / "metrics.md").read_text()
    section = document.partition("## Metrics of a worker")[2].partition("\n## ")[0]
    assert [line for line in section.splitlines() if line.startswith("| `")] == rows
    for metric in EVENT_METRICS:
        assert re.fullmatch(r"redrb_(trainer|maker|stage)_[a-z_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter")


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


def test_callbacks_write_for_tensorboard(tmp_path: Path) -> None:
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


def test_a_recipe_writes_for_tensorboard_by_a_setting(tmp_path: Path) -> None:
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


def test_callbacks_write_for_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_libraries_are_imported_only_when_they_are_used() -> None:
    code = (
        "import sys, redrb.workers.trainer, redrb.workers.maker, redrb.runtime.event_callbacks;"
        "print([name for name in ('prometheus_client', 'tensorboard', 'wandb', 'opentelemetry')"
        " if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=child_environment(PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == "[]"
