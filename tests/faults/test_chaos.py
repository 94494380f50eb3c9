"""Half a minute of the chaos run: docs/contributing/chaos.md says what it does and checks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REAL

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(400)
def test_nothing_is_lost_or_left_under_random_faults() -> None:
    options = ["--seconds", "20", "--interval", "0.65", "--seed", "12"]
    server = next(iter(REAL.values()))
    run = subprocess.run(
        [sys.executable, "-m", "tests.chaos", *options, "--server", server],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
