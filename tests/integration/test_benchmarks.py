"""The benchmarks run from end to end; their figures are not judged here."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_the_benchmark_of_orders_ends_with_its_figures() -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.orders", "--json", "--rounds", "1"),
            *("--groups", "2000", "--small", "100", "--samples", "256"),
            *("--repeats", "5", "--large-groups", "500"),
        ],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    figures = json.loads(done.stdout.splitlines()[-1])
    assert set(figures) == {
        *("stalest_over_fifo", "cost_1m_over_1k", "expire_speedup"),
        *("expire_speedup_facts", "expire_speedup_in_memory", "memory_ratio"),
    }
    costs = figures.pop("cost_1m_over_1k")
    assert set(costs) == {"put", "take", "count", "expire"}
    assert all(figure > 0 for figure in (*figures.values(), *costs.values()))


def test_the_benchmark_of_the_runtime_ends_with_its_figures() -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.runtime", "--json", "--rounds", "1"),
            *("--steps", "30", "--step-ms", "20"),
        ],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    figures = json.loads(done.stdout.splitlines()[-1])
    assert set(figures) == {"trainer_wait_share", "maker_send_share", "samples_per_second"}
    assert 0 <= figures["trainer_wait_share"] < 1
    assert 0 < figures["maker_send_share"] < 1
    assert figures["samples_per_second"] > 0
