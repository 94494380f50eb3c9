"""The README's example, run as it is printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = (Path(__file__).parents[2] / "README.md").read_text()


EXAMPLES = re.findall(r"<!-- a test runs this.*?```python\n(.*?)```", README, re.DOTALL)


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


def test_the_first_example_runs_as_printed() -> None:
    assert len(EXAMPLES[0].strip().splitlines()) <= 15
    printed = run(EXAMPLES[0])
    assert "torch.Size([2, 12]) tensor([5, 3])" in printed
    assert "put=1, acked=1" in printed


def test_the_example_of_replay_runs_as_printed() -> None:
    first, last = run(EXAMPLES[1]).splitlines()
    assert first == "1 1"
    assert last.startswith("1 Ledger(put=4, acked=1, expired=1, filtered=1")


def test_the_readme_leads_with_the_two_commands() -> None:
    first_block = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)[0]
    assert [line.split("#")[0].strip() for line in first_block.strip().splitlines()] == [
        "make demo",
        "make test",
    ]
