"""The commands of the workers beside a user's modules of the same names."""

import subprocess
import sys
import tomllib
from pathlib import Path

from redrb.environment import child_environment

ROOT = Path(__file__).parents[2]
NAMES = ("redrb-maker", "redrb-trainer", "redrb-stage")
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]


def test_a_package_workers_in_the_working_directory_changes_nothing(tmp_path):
    package = tmp_path / "workers"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('the package of the user')")
    script = "import contextlib, sys\n"
    for name in NAMES:
        module, _, function = SCRIPTS[name].partition(":")
        script += f"from {module} import {function}; sys.argv[0] = {name!r}\n"
        script += f"with contextlib.suppress(SystemExit): {function}()\n"
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
    assert [name for name in NAMES if f"usage: {name}" not in done.stdout] == []
