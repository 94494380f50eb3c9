"""Programs that tests need beside Python: a test is skipped without its program, and fails in CI.

`python3 tests/tools.py` prints the packages that are missing on this machine, for `.ci/run`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

PACKAGES = {
    "bash": "bash",
    "chromium": "chromium",
    "fish": "fish",
    "libfaketime": "faketime",
    "luacheck": "lua-check",
    "mount": "mount",
    "openssl": "openssl",
    "promtool": "prometheus",
    "redis-cli": "redis-tools",
    "redis-server": "redis-server",
    "zsh": "zsh",
}
"""Program, or library -> the package of Debian and Ubuntu that has it."""

OF_SLOW_TESTS = {"munged": "munge", "slurmctld": "slurm-wlm"}
"""The same, for programs that `make test` does not need."""

_SYSTEM = ("/usr/bin", "/usr/local/bin", "/usr/sbin")
ABSENT = " is not installed: "


def find(name: str) -> str | None:
    """Return the path of a program, or of the library libfaketime; None: it is absent."""
    if name == "libfaketime":
        library = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)
        return library and str(library)
    if name == "redis-server":  # not one that a Python package put on PATH
        return shutil.which(name, path=os.pathsep.join(_SYSTEM))
    return shutil.which(name)


def need(name: str) -> str:
    """Return the path of a program; if it is absent, the test is skipped, or fails in CI."""
    found = find(name)
    if found is None:
        skip(f"{name}{ABSENT}{install([name])}")
    return found


def skip(reason: str) -> NoReturn:
    """Skip the test; in CI (the variable CI), where everything is installed, it fails."""
    import pytest

    if os.environ.get("CI"):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


def install(names: Iterable[str]) -> str:
    """Return the command that installs programs of `PACKAGES` and `OF_SLOW_TESTS`."""
    return "apt-get install " + " ".join(sorted((PACKAGES | OF_SLOW_TESTS)[name] for name in names))


if __name__ == "__main__":
    print(*sorted(PACKAGES[name] for name in PACKAGES if find(name) is None))
