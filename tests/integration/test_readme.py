"""The README's example, run as it is printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_the_first_example_runs_as_printed() -> None:
    example = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
    assert len(example.strip().splitlines()) <= 15
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", example],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "torch.Size([2, 12]) tensor([5, 3])" in done.stdout
    assert "put=1, acked=1" in done.stdout
    assert done.stderr == ""


def test_the_readme_leads_with_the_two_commands() -> None:
    first_block = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)[0]
    assert [line.split("#")[0].strip() for line in first_block.strip().splitlines()] == [
        "make demo",
        "make test",
    ]
