"""The examples of README and docs/selection.md, run as they are printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from redrb.algorithms import GRPOStep
from tests.networks import PlainActor, seeded

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def example_in(page: str) -> str:
    """Return the one example of a page that is marked to be run."""
    (example,) = re.findall(r"<!-- a test runs this.*?```python\n(.*?)```", page, re.DOTALL)
    return str(example)


def run(example: str) -> str:
    """Run an example as a program; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", example],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_the_readme_example_runs_as_printed() -> None:
    example = example_in(README)
    assert len(example.strip().splitlines()) <= 15
    printed = run(example)
    assert "torch.Size([2, 12]) tensor([5, 3])" in printed
    assert "put=1, acked=1" in printed


def test_the_example_of_selection_runs_as_printed() -> None:
    page = (ROOT / "docs" / "selection.md").read_text()
    first, last = run(example_in(page)).splitlines()
    assert first == "1 1"
    assert last.startswith("1 Ledger(put=4, acked=1, expired=1, filtered=1")


def test_the_example_of_stages_runs_as_printed() -> None:
    example = example_in((ROOT / "docs" / "stages.md").read_text())
    assert run(example) == "(1,)\ntensor([1., 1., 1., 1.]) torch.Size([4, 3])\n"


def test_grpo_trains_on_the_batch_of_the_example_of_stages() -> None:
    names: dict[str, Any] = {}
    exec(example_in((ROOT / "docs" / "stages.md").read_text()), names)
    batch = names["batch"]
    batch.advantages = batch.reward
    actor = seeded(PlainActor)
    step = GRPOStep(actor, torch.optim.SGD(actor.parameters(), lr=0.1), beta=0.1)
    assert step(batch)["reference_kl"] > 0


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 130


def test_the_readme_leads_with_the_two_commands() -> None:
    first_block = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)[0]
    assert [line.split("#")[0].strip() for line in first_block.strip().splitlines()] == [
        "make demo",
        "make test",
    ]
