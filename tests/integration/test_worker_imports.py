"""The commands of the workers beside a user's modules of the same names."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from redrb.environment import child_environment

ROOT = Path(__file__).parents[2]
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]


@pytest.mark.parametrize("name", ["redrb-maker", "redrb-trainer", "redrb-stage"])
def test_a_package_workers_in_the_working_directory_changes_nothing(
    tmp_path: Path, name: str
) -> None:
    package = tmp_path / "workers"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('the package of the user')")
    module, _, function = SCRIPTS[name].partition(":")
    script = f"import sys; from {module} import {function}; sys.argv[0] = {name!r}; {function}()"
    done = subprocess.run(
        [sys.executable, "-c", script, "--help"],
        cwd=tmp_path,
        env=child_environment(PYTHONPATH=f"{tmp_path}:{ROOT}"),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"usage: {name}" in done.stdout
