"""The benchmarks run from end to end; their figures are not judged here."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from benchmarks import memory
from benchmarks.guard import lost
from benchmarks.limits import beyond_floor, missed_peers
from benchmarks.report import load
from benchmarks.server import private_server
from benchmarks.shapes import SHAPES
from benchmarks.systems import Job, rows
from benchmarks.systems.rows import Row
from redrb import make_experience_batch
from redrb.experience.records import named_tensors


def benchmark(module: str, *options: str, timeout: int = 280) -> str:
    """Run a benchmark to its end; returns what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", module, *options],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "sections",
    [
        "shapes,puts,orders",
        "servers",
        "scale",
        "latency,backlog,profile",
        "shards,replicas,observing",
        "staleness",
    ],
)
def test_the_benchmark_writes_figures_and_plots(sections: str, tmp_path: Path) -> None:
    small = ("--quick", "--rounds", "1", "--size", "0.01")
    said = benchmark("benchmarks", *small, "--only", sections, "--results", str(tmp_path))
    assert "| figure | target | meets it | misses it |" in said
    for section in sections.split(","):
        figures = json.loads((tmp_path / f"{section}.json").read_text())
        assert figures["run"]["rounds"] == 1
        assert (tmp_path / f"{section}.png").stat().st_size > 10_000


def test_without_a_vllm_the_section_of_engines_says_that_it_was_left_out(tmp_path: Path) -> None:
    said = benchmark("benchmarks", "--quick", "--only", "engines", "--results", str(tmp_path))
    assert "left out: it needs --vllm FOLDER" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif("VLLM" not in os.environ, reason="needs VLLM: a folder with bin/vllm and model")
def test_new_weights_reach_vllm_servers_both_ways(tmp_path: Path) -> None:
    small = ("--quick", "--rounds", "1", "--results", str(tmp_path))
    benchmark("benchmarks", *small, "--only", "engines", "--vllm", os.environ["VLLM"], timeout=1100)
    figures = json.loads((tmp_path / "engines.json").read_text())
    assert len(figures["cases"]) == 8
    assert len(figures["backend_over_folder"]) == 4
    for case in figures["cases"].values():
        assert case["own_over_layer"] < 2
    assert (tmp_path / "engines.png").stat().st_size > 10_000


@pytest.mark.parametrize("shape", ["ragged", "grpo"])
@pytest.mark.parametrize("system", ["pipelinerl", "rocket_learn"])
def test_a_peer_gives_the_batches_that_redrb_gives(
    system: str, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module(f"benchmarks.systems.{system}")
    batches: list[Row] = []
    monkeypatch.setattr(rows, "check_full", lambda batch, _: batches.append(batch))
    groups = 2 * SHAPES[shape].take_groups
    with private_server() as server:
        job = Job(server.url, "peer", shape, groups, threading.Barrier(2))
        producer = threading.Thread(target=module.produce, args=(job,))
        producer.start()
        module.consume(job)
        producer.join()
    taken = SHAPES[shape].items(groups)[SHAPES[shape].take_groups :]
    expected = make_experience_batch([item for group in taken for item in group])
    assert len(batches) == 2
    assert batches[1].keys() == named_tensors(expected).keys()
    for name, tensor in named_tensors(expected).items():
        assert torch.equal(batches[1][name], tensor)


def test_the_guard_fails_where_more_than_a_fifth_is_lost() -> None:
    expected = {"rlhf-1k": 1.5, "grpo": 2.0}
    assert lost(expected, {"rlhf-1k": 1.21, "grpo": 1.61}) == []
    assert lost(expected, {"rlhf-1k": 1.19, "grpo": 2.5}) == ["rlhf-1k"]


def test_limits_name_the_missed_targets_and_what_they_allow() -> None:
    def system(each_us: float, rate: float) -> dict[str, float]:
        parts = dict.fromkeys(("server_us", "producer_us", "consumer_us"), each_us)
        return {**parts, "samples_per_s": rate}

    systems = {
        "redrb": system(20, 300),
        "packed": system(10, 500),
        "torchrl": system(60, 100),
        "ray_queue": system(200, 30),
    }
    over = {"torchrl": 3.0, "ray_queue": 10.0}
    results = {"shapes": {"shapes": {"grpo": {"systems": systems, "redrb_over": over}}}}
    assert beyond_floor(results).splitlines()[2:] == [
        "| `grpo` | 30.0 | 60.0 | 10.0 | 10.0 | 10.0 |"
    ]
    assert missed_peers(results).splitlines()[2:] == [
        "| `grpo`, torchrl | 3.00x | 4x | 5.00x | 45.0 | 60.0 |"
    ]


def test_the_page_counts_the_missed_targets_of_the_newest_results() -> None:
    root = Path(__file__).parents[2]
    missed = missed_peers(load(root / "benchmarks" / "results"))
    page = (root / "docs" / "reference" / "performance.md").read_text()
    assert f"misses it in {len(missed.splitlines()) - 2}." in page


@pytest.mark.slow
def test_the_benchmark_of_the_runtime_ends_with_its_figures() -> None:
    said = benchmark(
        "benchmarks.runtime", "--json", "--rounds", "1", "--steps", "30", "--step-ms", "20"
    )
    figures = json.loads(said.splitlines()[-1])
    assert set(figures) == {"trainer_wait_share", "maker_send_share", "samples_per_second"}
    assert 0 <= figures["trainer_wait_share"] < 1
    assert 0 < figures["maker_send_share"] < 1
    assert figures["samples_per_second"] > 0


def test_the_formula_of_memory_is_above_what_a_server_uses() -> None:
    page = Path(__file__).parents[2] / "docs" / "how-to" / "size-a-redis.md"
    kilobytes = memory.PER_GROUP // 1000
    printed = f"= {memory.MARGIN} x (N x (B + {kilobytes} kB) + 3 x V + 26 x D)"
    assert printed in page.read_text()
    for found in (memory.groups("grpo", 5, None), memory.weights("killed", 20, None)):
        assert 0.5 < found["measured_over_formula"] < 1, found
