"""The benchmarks run from end to end; their figures are not judged here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


def benchmark(module: str, *options: str) -> str:
    """Run a benchmark to its end; returns what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", module, *options],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("sections", ["shapes,puts,orders", "servers", "scale", "latency,backlog"])
def test_the_benchmark_writes_figures_and_plots(sections: str, tmp_path: Path) -> None:
    small = ("--quick", "--rounds", "1", "--size", "0.01")
    said = benchmark("benchmarks", *small, "--only", sections, "--results", str(tmp_path))
    assert "| figure | target | measured |" in said
    for section in sections.split(","):
        figures = json.loads((tmp_path / f"{section}.json").read_text())
        assert figures["run"]["rounds"] == 1
        assert (tmp_path / f"{section}.png").stat().st_size > 10_000


def test_the_benchmark_of_the_runtime_ends_with_its_figures() -> None:
    said = benchmark(
        "benchmarks.runtime", "--json", "--rounds", "1", "--steps", "30", "--step-ms", "20"
    )
    figures = json.loads(said.splitlines()[-1])
    assert set(figures) == {"trainer_wait_share", "maker_send_share", "samples_per_second"}
    assert 0 <= figures["trainer_wait_share"] < 1
    assert 0 < figures["maker_send_share"] < 1
    assert figures["samples_per_second"] > 0
