"""The commands `save`, `resume`, `export` and `import`, and how much memory they need."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import redrb
from redrb import ExperienceStream
from redrb.environment import PREFIX, child_environment
from tests.audit import audit
from tests.samples import numbered, numbers
from tests.servers import programs

Run = Callable[..., "subprocess.CompletedProcess[str]"]

GROUP_BYTES = 1 << 20
GROUPS = 96

on_one_server = pytest.mark.parametrize("real_url", list(programs())[:1], indirect=True)


@pytest.fixture
def run(real_url: str, namespace: str) -> Run:
    """Run a command on the server, in the test's namespace."""

    def started(*arguments: object) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-m", "redrb.cli", *map(str, arguments), "--namespace", namespace]
        return subprocess.run(
            words,
            env=child_environment(without=PREFIX, REDRB_URL=real_url),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return started


def printed(completed: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert completed.returncode == 0, completed.stderr
    figures: dict[str, Any] = json.loads(completed.stdout)
    return figures


@on_one_server
def test_a_task_goes_to_files_and_back(
    real_url: str, namespace: str, run: Run, tmp_path: Path
) -> None:
    with redrb.connect(real_url) as client:
        stream = ExperienceStream(client, "from", namespace=namespace, order="stalest")
        for number in range(5):
            stream.put(numbered(number), policy_version=9 - number)
        stream.take(1, timeout=0).ack()
        saved = printed(run("save", "from", tmp_path / "file", "--json"))
        assert (saved["groups"], saved["path"]) == (4, str(tmp_path / "file"))
        assert printed(run("resume", "to", tmp_path / "file", "--json"))["groups"] == 4
        back = ExperienceStream(client, "to", namespace=namespace)
        audit(back)
        assert back.stats().ledger == redrb.Ledger(put=4, waiting=4)  # counters begin anew
        assert numbers(back.take(4, timeout=0)) == [3, 2, 1, 0]
        exported = printed(run("export", "from", tmp_path / "out", "--json"))
        assert (exported["groups"], exported["shards"]) == (4, 1)
        shown = run("save", "from", tmp_path / "file")
        assert shown.stdout.splitlines()[1].split() == ["groups", "4"]


@on_one_server
def test_errors_are_printed(real_url: str, namespace: str, run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"not a task")
    for arguments, status, words in (
        (("save", "nothing", tmp_path / "x"), 2, "there is no task"),
        (("resume", "to", tmp_path / "none"), 2, "cannot be read"),
        (("resume", "to", tmp_path / "file"), 1, "not a saved task"),
        (("export", "nothing", tmp_path / "x"), 2, "there is no task"),
    ):
        completed = run(*arguments)
        assert completed.returncode == status, completed.stderr
        assert words in completed.stderr
        assert "Traceback" not in completed.stderr
    assert not (tmp_path / "x").exists()


MEASURED = """
import resource, sys
import redrb
from redrb.stream.export import export_task
act, namespace, task, path = sys.argv[1:]
with redrb.connect() as client:
    if act == "export":
        export_task(client, task, path, namespace=namespace, shard_bytes=8 << 20)
    else:
        getattr(redrb.ExperienceStream(client, task, namespace=namespace), act)(path)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
@on_one_server
def test_memory_does_not_grow_with_the_task(real_url: str, namespace: str, tmp_path: Path) -> None:
    def peak_kb(act: str, task: str, path: Path) -> int:
        completed = subprocess.run(
            [sys.executable, "-c", MEASURED, act, namespace, task, str(path)],
            env=child_environment(without=PREFIX, REDRB_URL=real_url),
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert completed.returncode == 0, completed.stderr
        return int(completed.stdout)

    stuff = torch.randint(0, 256, (GROUP_BYTES,), dtype=torch.uint8)
    peaks: dict[int, dict[str, int]] = {}
    with redrb.connect(real_url) as client:
        for groups in (8, GROUPS):
            names = [f"{act}-{groups}" for act in ("from", "resumed")]
            streams = [
                ExperienceStream(client, name, namespace=namespace, order="lifo") for name in names
            ]
            for number in range(groups):
                streams[0].put(numbered(number, tensors={"stuff": stuff.roll(number)}))
            file, out = tmp_path / f"file-{groups}", tmp_path / f"out-{groups}"
            peaks[groups] = {
                "save": peak_kb("save", names[0], file),
                "export": peak_kb("export", names[0], out),
                "resume": peak_kb("resume", names[1], file),
            }
            assert file.stat().st_size > groups * GROUP_BYTES
            for stream in streams:
                audit(stream)
                assert len(stream) == groups
                stream.clear()
    for act, peak in peaks[GROUPS].items():
        assert peak - peaks[8][act] < 24 << 10, (act, peaks)
