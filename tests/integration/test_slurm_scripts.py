"""examples/slurm without a Slurm: signals for a maker's shell, and the command of the page."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from redrb.recipe.loading import load
from redrb.recipe.settings import resolve
from tests.integration.test_operations_pages import script, started, variables

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "slurm"

ENDS_SLOWLY = """
trap 'echo maker >> signals; sleep 1.5; echo done >> signals; exit 3' TERM
echo maker >> begun
while :; do sleep 0.1; done
"""
"""A maker that needs some time after SIGTERM, and notes each that it gets."""

VLLM = """
trap 'echo vllm >> signals; exit 0' TERM
echo "$@" > served
while :; do sleep 0.1; done
"""


@pytest.mark.parametrize("with_vllm", [False, True])
def test_a_maker_gets_one_signal_and_its_vllm_outlives_it(tmp_path: Path, with_vllm: bool) -> None:
    """Slurm may signal all processes of a step, and job.sbatch signals again."""
    script(tmp_path, "bin/redrb-maker", 'echo "$@" > flags' + ENDS_SLOWLY)
    script(tmp_path, "env/bin/vllm", VLLM)
    more = {"VLLM": str(tmp_path / "env"), "MODEL": "a/model"} if with_vllm else {}
    known = variables(tmp_path, RECIPE="sorting", **more)
    with started(["bash", str(FOLDER / "maker.sh")], tmp_path, known) as shell:
        wait_for(tmp_path / "begun")
        if with_vllm:
            wait_for(tmp_path / "served")
        for _ in range(3):
            os.killpg(shell.pid, signal.SIGTERM)
            time.sleep(0.3)
        assert shell.wait(20) == 3, (tmp_path / "output").read_text()
    signals = (tmp_path / "signals").read_text().split()
    assert signals == ["maker", "done", *["vllm"] * with_vllm]
    assert ("--engine vllm " in (tmp_path / "flags").read_text()) == with_vllm


def wait_for(path: Path) -> None:
    end = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < end, path
        time.sleep(0.05)


def test_the_ranks_of_gsm8k_train_the_groups_of_a_step_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    page = (ROOT / "docs" / "how-to" / "slurm.md").read_text()
    [settings] = re.findall(r"^((?:REDRB_\w+=\S+ )+)sbatch job\.sbatch$", page, re.MULTILINE)
    for setting in settings.split():
        monkeypatch.setenv(*setting.split("="))
    loaded, _ = load(str(ROOT / "examples" / "gsm8k" / "recipe.py"))
    mine, _ = resolve(loaded, flags={}, file=None)
    job = (FOLDER / "job.sbatch").read_text()
    [ranks] = re.findall(r"^GPUS=\$\{GPUS:-(\d+)\}", job, re.MULTILINE)
    assert (mine.shard, int(ranks) * mine.groups) == (True, loaded.groups)
