"""Disks for tests: a small one that is full soon, and that can be made read-only."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.tools import need


@contextmanager
def small_disk(path: Path, size: str) -> Iterator[Path]:
    """Mount a disk at `path`; skips the test where that is not allowed."""
    path.mkdir(exist_ok=True)
    made = _mount("-t", "tmpfs", "-o", f"size={size}", "redrb-test", str(path))
    if made.returncode:
        pytest.skip(f"no disk can be mounted here: {made.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True, timeout=20)


@contextmanager
def read_only(disk: Path) -> Iterator[None]:
    """Make the disk read-only in this block, at a moment when no file on it is open for writes."""
    _remount(disk, "ro")
    try:
        yield
    finally:
        _remount(disk, "rw")


def fill(disk: Path) -> Path:
    """Take all the room that is left on the disk; returns the file that has it."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (4096, 1):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:
                continue
    return filler


def _remount(disk: Path, mode: str) -> None:
    until = time.monotonic() + 20
    while (done := _mount("-o", f"remount,{mode}", str(disk))).returncode:
        assert "busy" in done.stderr, done.stderr
        assert time.monotonic() < until, done.stderr


def _mount(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [need("mount"), *arguments], capture_output=True, text=True, check=False, timeout=20
    )
