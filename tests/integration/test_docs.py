"""The examples of README and of some pages, run as they are printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

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


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 130


def test_the_readme_leads_with_the_two_commands() -> None:
    first_block = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)[0]
    assert [line.split("#")[0].strip() for line in first_block.strip().splitlines()] == [
        "make demo",
        "make test",
    ]
