"""Files that killed processes left incomplete are deleted by the next one that writes."""

from __future__ import annotations

import asyncio
import errno
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import redrb
from redrb import ReplayBuffer
from redrb.errors import ConfigError
from redrb.staging import staging
from redrb.stream.export import export_task
from redrb.weights.files.adapter_folder import save_adapter
from redrb.weights.files.safetensors import save_safetensors
from redrb.weights.wire.lora_config import LoraConfig
from tests.samples import numbered

WRITES = """
import sys
from pathlib import Path
from redrb.staging import staging
with staging(Path(sys.argv[1])) as folder:
    (folder / "half").write_text("half")
    print("writes", flush=True)
    sys.stdin.read()
"""

SAVES_A_BUFFER = """
import asyncio, sys
from pathlib import Path
import redrb
from redrb import ReplayBuffer
from redrb.stream.saving import saving

save = saving.save

def stop(store, path):
    if store.task == "c":
        print("writes", flush=True)
        sys.stdin.read()
    return save(store, path)

saving.save = stop

async def main():
    with redrb.connect("fake://staging") as client:
        async with ReplayBuffer(client) as buffer:
            for task in "abc":
                await buffer.put([{"reward": 1.0}], task)
            await buffer.save(Path(sys.argv[1]))

asyncio.run(main())
"""


def _until_it_writes(program: str, path: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "writes\n"
    return process


def _kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate(timeout=20)


def _save_task(path: Path) -> None:
    with redrb.connect("fake://task") as client, redrb.ExperienceStream(client, "math") as stream:
        stream.put(numbered(1))
        stream.save(path)


def _export(path: Path) -> None:
    with redrb.connect("fake://task") as client:
        with redrb.ExperienceStream(client, "math") as stream:
            stream.put(numbered(1))
        export_task(client, "math", path)


def _save_adapter(path: Path) -> None:
    tensors = {"q.lora_A": torch.zeros(2, 4), "q.lora_B": torch.zeros(4, 2)}
    save_adapter(path, tensors, {"q": LoraConfig(r=2, lora_alpha=4)})


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that a killed process left for the file `target`."""
    directory = tmp_path_factory.mktemp("killed")
    _kill(_until_it_writes(WRITES, directory / "target"))
    (found,) = directory.iterdir()
    return found


@pytest.mark.parametrize(
    "write",
    [
        _save_task,
        _export,
        _save_adapter,
        lambda path: save_safetensors(path, {"x": torch.zeros(2)}),
    ],
    ids=["task", "export", "adapter", "weights"],
)
def test_every_writer_deletes_the_files_of_killed_processes(
    killed: Path, tmp_path: Path, write: Callable[[Path], None]
) -> None:
    left = tmp_path / killed.name
    left.mkdir()
    for file in killed.iterdir():
        (left / file.name).write_bytes(file.read_bytes())
    without_lock = tmp_path / f".target.{'0' * 32}"
    without_lock.mkdir()
    others = [tmp_path / ".target.notes", tmp_path / f".other.{'0' * 32}"]
    for other in others:
        other.mkdir()
    write(tmp_path / "target")
    assert sorted(tmp_path.iterdir()) == sorted([*others, tmp_path / "target"])


def test_files_that_a_process_still_writes_stay(tmp_path: Path) -> None:
    alive = _until_it_writes(WRITES, tmp_path / "target")
    try:
        (written,) = tmp_path.iterdir()
        with staging(tmp_path / "target") as folder:
            assert sorted(tmp_path.iterdir()) == sorted([folder, written])
        assert (written / "half").read_text() == "half"
        alive.communicate("", timeout=20)
        assert list(tmp_path.iterdir()) == []
    finally:
        _kill(alive)


def test_a_saved_buffer_has_no_files_of_a_killed_save(tmp_path: Path) -> None:
    index = tmp_path / "saved_tasks.json"

    async def main() -> None:
        with redrb.connect("fake://staging-buffer") as client:
            async with ReplayBuffer(client) as buffer:
                await buffer.put([{"reward": 1.0}], "task")
                await buffer.save(tmp_path)
                earlier = set(tmp_path.iterdir())
                _kill(_until_it_writes(SAVES_A_BUFFER, tmp_path))
                assert len(set(tmp_path.iterdir()) - earlier) == 3  # two tasks and a folder
                with staging(index) as folder:  # another process that saves into the directory
                    written = tmp_path / f"{folder.name[-32:]}-0.redrb"
                    written.touch()
                    await buffer.save(tmp_path)
                    (saved,) = json.loads(index.read_text())["files"].values()
                    assert set(tmp_path.iterdir()) == {index, tmp_path / saved, folder, written}

    asyncio.run(main())


def test_a_save_beside_an_index_that_cannot_be_read_deletes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Path.read_bytes

    def fails(path: Path) -> bytes:
        if path.name == "saved_tasks.json":
            raise OSError(errno.EIO, "Input/output error")
        return read(path)

    async def main() -> None:
        with redrb.connect("fake://staging-unreadable") as client:
            async with ReplayBuffer(client) as buffer:
                await buffer.put([{"reward": 1.0}], "task")
                await buffer.save(tmp_path)
                earlier = set(tmp_path.iterdir())
                with monkeypatch.context() as patch:
                    patch.setattr(Path, "read_bytes", fails)
                    with pytest.raises(ConfigError, match="Input/output error"):
                        await buffer.save(tmp_path)
                    assert set(tmp_path.iterdir()) == earlier
                    with pytest.raises(ConfigError, match="cannot be read: Input/output error"):
                        await buffer.resume(tmp_path)
                await buffer.save(tmp_path)

    asyncio.run(main())
