"""The example in docs/feeding.md, run as it is printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "feeding.md").read_text()


def test_the_example_runs_as_printed(tmp_path: Path) -> None:
    (example,) = re.findall(r"<!-- a test runs this.*?```python\n(.*?)```", PAGE, re.DOTALL)
    program = tmp_path / "example.py"
    program.write_text(example)
    done = subprocess.run(
        [sys.executable, program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.count("torch.Size([4, 9])") == 3
    assert "put=12, acked=12" in done.stdout
