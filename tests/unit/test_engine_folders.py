"""Folders of weights that the makers of one machine share."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from pathlib import Path

import pytest

from redrb.engines.folders import VersionFolders


def names(root: Path) -> list[str]:
    return sorted(path.name.partition(".")[2] for path in root.iterdir() if path.is_dir())


def write(path: Path) -> None:
    (path / "weights").write_text(path.name)


def test_a_version_is_written_once_and_removed_when_nobody_uses_it(tmp_path: Path) -> None:
    one, other, written = VersionFolders(tmp_path), VersionFolders(tmp_path), []

    def noted(path: Path) -> None:
        written.append(path)
        write(path)

    assert one.use("v1", noted) == other.use("v1", noted)
    assert len(written) == 1
    path = one.use("v2", noted)
    assert (path / "weights").exists()
    assert names(tmp_path) == ["v1", "v2"], "the other one has v1 still"
    other.use("v2", noted)
    assert (names(tmp_path), len(written)) == (["v2"], 2)


def test_a_folder_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    folders = VersionFolders(tmp_path)

    def full(path: Path) -> None:
        write(path)
        raise OSError("no space left on device")

    folders.use("v1", write)
    with pytest.raises(OSError, match="no space"):
        folders.use("v2", full)
    assert names(tmp_path) == ["v1"]
    folders.use("v2", write)
    assert names(tmp_path) == ["v2"]


def _use(root: str, name: str, ready: multiprocessing.synchronize.Event) -> None:
    def slow(path: Path) -> None:
        write(path)
        if name == "torn":
            ready.set()
            threading.Event().wait(60)

    folders = VersionFolders(Path(root))
    folders.use(name, slow)
    ready.set()
    threading.Event().wait(60)


@pytest.mark.parametrize("name", ["torn", "v1"])
def test_what_a_killed_process_leaves_is_removed(tmp_path: Path, name: str) -> None:
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=_use, args=(str(tmp_path), name, ready))
    process.start()
    try:
        assert ready.wait(60)
        folders = VersionFolders(tmp_path)
        folders.use("v2", write)
        assert len(names(tmp_path)) == 2, "the other one is in use"
    finally:
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
    folders.use("v3", write)
    assert names(tmp_path) == ["v3"]
    assert (folders.use("torn", write) / "weights").exists()
