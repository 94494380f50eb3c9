"""Builds redrb's sdist and wheel, and tries the wheel in a new environment, outside of the clone.

`make wheel PYTHON=python3.12` runs it with that Python. It needs a package index, and leaves both
files in `dist/`.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PIP = ("-m", "pip", "--disable-pip-version-check", "--quiet", "install")
LOCK = (ROOT / "constraints.txt").as_uri()
ENVIRONMENT = (f"PIP_CONSTRAINT={LOCK}", f"PIP_BUILD_CONSTRAINT={LOCK}")
DEMO = ("demo", "--max-seconds", "300", "--json")


def run(*words: Path | str, folder: Path) -> str:
    """Run a program in a folder, as a shell that knows nothing of the clone does."""
    print("$", *words, flush=True)
    done = subprocess.run(
        ["env", "-u", "PYTHONPATH", "-u", "REDRB_URL", *ENVIRONMENT, *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
        timeout=3600,
        check=True,
    )
    return done.stdout


def tracked(folder: str = "") -> set[str]:
    """Return the files of the clone that git knows."""
    listed = run("git", "ls-files", "-z", "--", folder or ".", folder=ROOT)
    return {name for name in listed.split("\0") if name}


def build(scratch: Path) -> tuple[Path, Path]:
    """Build the sdist, and the wheel from it; returns both."""
    run(sys.executable, "-m", "venv", scratch / "build", folder=scratch)
    python = scratch / "build" / "bin" / "python"
    run(python, *PIP, "build", folder=scratch)
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    run(python, "-m", "build", "--outdir", ROOT / "dist", ROOT, folder=scratch)
    (sdist,) = (ROOT / "dist").glob("redrb-*.tar.gz")
    (wheel,) = (ROOT / "dist").glob("redrb-*.whl")
    return sdist, wheel


def check_contents(sdist: Path, wheel: Path) -> None:
    """Raise SystemExit unless both have every file of the package, and the sdist what builds it."""
    package = tracked("redrb")
    with zipfile.ZipFile(wheel) as archive:
        _require(package, archive.namelist(), wheel)
    with tarfile.open(sdist) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    _require(package | {"LICENSE", "README.md", "pyproject.toml", "setup.py"}, names, sdist)


def _require(wanted: set[str], found: list[str], archive: Path) -> None:
    if missing := sorted(wanted - set(found)):
        raise SystemExit(f"{archive.name} lacks {', '.join(missing)}")
    print(f"{archive.name} has all {len(wanted)} files")


def try_out(wheel: Path, scratch: Path) -> None:
    """Install the wheel in a new environment; run its commands and the example of the README."""
    run(sys.executable, "-m", "venv", scratch / "venv", folder=scratch)
    bin_ = scratch / "venv" / "bin"
    run(bin_ / "python", *PIP, wheel, folder=scratch)
    place = run(bin_ / "python", "-c", "import redrb; print(redrb.__file__)", folder=scratch)
    assert Path(place.strip()).is_relative_to(scratch), place
    print(run(bin_ / "redrb", "--version", folder=scratch), end="")
    example = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert example is not None, "README.md has no example"
    print(run(bin_ / "python", "-c", example[1], folder=scratch), end="")
    print(run(bin_ / "redrb", *DEMO, folder=scratch).splitlines()[-1])


def main() -> None:
    """Build both, look into them, and try the wheel out."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--wheel", type=Path, help="try this wheel, and build nothing")
    given = parser.parse_args().wheel
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        if given is None:
            sdist, wheel = build(scratch)
            check_contents(sdist, wheel)
        try_out(given.resolve() if given else wheel, scratch)
    print(f"the wheel works with Python {sys.version.split()[0]}")


if __name__ == "__main__":
    main()
