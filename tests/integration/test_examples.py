"""The examples, run as a user runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.servers import Server, programs

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("own_server", list(programs())[-1:], indirect=True)
def test_the_port_of_colossalais_examples_trains(own_server: Callable[..., Server]) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / "colossalai.py"],
        env={**os.environ, "REDRB_URL": own_server().url},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "split and batched again: 8 samples"
    assert lines[1] == "sampled: 8 samples, 0 batches left"
    assert any(line.startswith("trained, and sent weights up to version 5") for line in lines)
    assert any(line.startswith("made experience with weights up to version") for line in lines)


@pytest.mark.parametrize("own_server", list(programs())[-1:], indirect=True)
def test_trls_trainer_learns_from_a_maker_in_another_process(
    own_server: Callable[..., Server],
) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / "trl_grpo.py"],
        env={**os.environ, "REDRB_URL": own_server().url, "STEPS": "15"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    reward, ledger = done.stdout.splitlines()[-2:]
    first, last = (float(part.split()[0]) for part in reward.removeprefix("reward: ").split(", "))
    assert last > first + 0.2, reward
    assert "acked=60" in ledger
