"""The notebook of the first hour, run as a program."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from redrb.environment import PREFIX, child_environment
from tests.documents import DOCS, ROOT

NOTEBOOK = json.loads((DOCS / "notebooks" / "first_hour.ipynb").read_text())
CODE = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
JOB = next(number for number, text in enumerate(CODE) if '"new", "grpo"' in text)
"""Number of the cell with which the second half begins, the job."""


def run(cells: list[str], folder: Path) -> str:
    """Run cells as one program; returns what it printed."""
    for package in ("redrb", "transformers", "matplotlib"):  # the notebook would install it
        assert importlib.util.find_spec(package), package
    (folder / "notebook.py").write_text("\n".join(cells))
    # the socket of the job's server is below TMPDIR, and must have a short path
    with tempfile.TemporaryDirectory() as short:
        done = subprocess.run(
            [sys.executable, "notebook.py"],
            cwd=folder,
            env=child_environment(
                without=PREFIX, PYTHONPATH=str(ROOT), MPLBACKEND="agg", TMPDIR=short
            ),
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.slow
def test_a_killed_trainer_loses_no_group(tmp_path: Path) -> None:
    printed = run(CODE[:JOB], tmp_path)
    assert "sequences (4, 12)" in printed
    assert "holds groups (3, 4)\nLedger(put=4, acked=2," in printed
    assert "killed by signal 9" in printed
    assert "got groups (3, 4) after" in printed
    assert "none is lost: True" in printed


@pytest.mark.slow
def test_the_job_learns(tmp_path: Path) -> None:
    printed = run(
        [CODE[0], *CODE[JOB:], "print('curve', len(steps), steps[-1]['reward'])"], tmp_path
    )
    assert "exit status 0" in printed
    steps, reward = re.findall(r"^curve (\d+) ([\d.]+)$", printed, re.MULTILINE)[0]
    assert int(steps) >= 10
    assert float(reward) > 0.6


def test_the_notebook_has_the_outputs_of_a_whole_run() -> None:
    cells = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} == {"stream", "display_data"}
    assert "/tmp/tmp" not in json.dumps(NOTEBOOK)
