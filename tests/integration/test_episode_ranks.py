"""Ranks of a sharded model evaluate episodes together, however long their tools take."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from redrb.environment import PREFIX, child_environment
from tests import warm


@pytest.mark.slow
def test_sharded_ranks_evaluate_episodes_with_a_slow_tool(tmp_path: Path) -> None:
    environment = child_environment(without=PREFIX, OMP_NUM_THREADS="1")
    ranks = [
        warm.Popen(
            [sys.executable, "-m", "tests.integration.episodes_rank"]
            + [str(rank), str(tmp_path / "store")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        output = [rank.communicate(timeout=240) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert [rank.returncode for rank in ranks] == [0, 0], output
    names = ["failed", "reward", "samples"]
    assert [out.strip() for out, _ in output] == [str([names, names]), "[None, None]"]
