"""Processes die while they save and resume tasks: the same call goes on, and puts nothing twice."""

from __future__ import annotations

import multiprocessing
import signal
import subprocess
import sys
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

import redrb
from redrb import ConfigError
from redrb.stream.saving import saving
from redrb.stream.saving.resuming import TaskFile, read_directory, unresumed
from redrb.stream.saving.saving import save, save_tasks
from redrb.stream.task.store import TaskStore
from tests import warm
from tests.audit import audit
from tests.samples import numbered, numbers

RESUME = """
import os, signal, sys, redrb
from redrb.stream.saving.resuming import Resumption
url, namespace, path, puts = sys.argv[1:]
put, left = Resumption._flush, iter(range(int(puts)))

def put_or_die(resumption):
    if next(left, None) is None:
        os.kill(os.getpid(), signal.SIGKILL)
    put(resumption)

Resumption._flush = put_or_die
with redrb.connect(url) as client:
    redrb.ExperienceStream(client, "math", namespace=namespace).resume(path)
"""
GROUPS = 6000


@pytest.mark.parametrize("puts", [(0,), (1,), (2, 7), (40, 1, 60), (200,)])
def test_a_resume_that_is_killed_at_any_time_goes_on(
    real_url: str, namespace: str, puts: tuple[int, ...], tmp_path: Path
) -> None:
    """`puts`: after how many puts each process is killed; then a trainer takes some groups."""
    path = tmp_path / "math.redrb"
    with redrb.connect(real_url) as client:
        source = redrb.ExperienceStream(client, "source", namespace=namespace, order="stalest")
        for first in range(0, GROUPS, 1000):
            source.put_many(
                [[numbered(n, policy_version=GROUPS - n)] for n in range(first, first + 1000)]
            )
        source.save(path)
        target = redrb.ExperienceStream(client, "math", namespace=namespace)
        taken: list[int] = []
        for kill in puts:
            process = warm.Popen(
                [sys.executable, "-c", RESUME, real_url, namespace, path, str(kill)]
            )
            assert process.wait(60) in (0, -signal.SIGKILL)
            found = len(target)
            if found:
                lease = target.take(min(found, 100), timeout=5)
                taken += numbers(lease)
                lease.ack()
        with suppress(ConfigError):  # all of it was put, and used since
            target.resume(path)
        audit(target)
        left = target.take(GROUPS - len(taken), timeout=5)
        assert sorted(taken + numbers(left)) == [*range(GROUPS)]
        assert left.policy_versions == sorted(left.policy_versions)
        left.ack()
        for stream in (source, target):
            stream.close()
            stream.clear()


def test_the_files_of_killed_saves_are_deleted_and_others_stay(
    real_url: str, namespace: str, tmp_path: Path
) -> None:
    path = tmp_path / "math.redrb"
    writing = """
import sys
from pathlib import Path
from redrb.stream.saving.saving import replaced
with replaced(Path(sys.argv[1])) as file:
    file.write(b"half")
    print("writes", flush=True)
    sys.stdin.read()
"""
    processes = [
        warm.Popen(
            [sys.executable, "-c", writing, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    for process in processes:
        assert process.stdout.readline() == "writes\n"
    alive, *killed = processes
    for process in killed:
        process.kill()
        process.wait(20)
    own = tmp_path / ".math.redrb.notes"
    own.write_text("not of a save")
    with redrb.connect(real_url) as client:
        stream = redrb.ExperienceStream(client, "math", namespace=namespace)
        stream.put(numbered(1))
        stream.save(path)
        stream.close()
        stream.clear()
    assert len(list(tmp_path.iterdir())) == 3  # the save, `own`, and the file that is still written
    assert own.exists()
    alive.communicate("", timeout=20)
    assert path.read_bytes() == b"half"
    for process in killed:
        process.communicate(timeout=20)
    assert sorted(tmp_path.iterdir()) == sorted([own, path])


def save_until_killed(url: str, namespace: str, path: Path, first: Connection) -> None:
    """Save two tasks; report when the first file is in its place, and wait for the kill."""

    def report_first(*arguments: Any) -> Any:
        if list(path.glob("*-0.redrb")):
            first.send("first")
            time.sleep(60)
        return save(*arguments)

    with pytest.MonkeyPatch.context() as patch, redrb.connect(url) as client:
        patch.setattr(saving, "save", report_first)
        save_tasks({name: TaskStore.of(client, namespace, name) for name in ("a", "b")}, path)


def test_a_killed_save_of_two_tasks_leaves_files_only_until_the_next(
    real_url: str, namespace: str, tmp_path: Path
) -> None:
    path = tmp_path / "math"
    with redrb.connect(real_url) as client:
        stores = {name: TaskStore.of(client, namespace, name) for name in ("a", "b")}
        streams = [redrb.ExperienceStream(client, name, namespace=namespace) for name in stores]
        for stream in streams:
            stream.put_many([[numbered(number)] for number in range(2)])
        fork = multiprocessing.get_context("fork")
        reader, writer = fork.Pipe()
        process = fork.Process(
            target=save_until_killed, args=(real_url, namespace, path, writer), daemon=True
        )
        process.start()
        assert reader.poll(20)
        process.kill()
        process.join(20)
        assert list(path.glob("*.redrb"))
        save_tasks(stores, path)
        assert len(list(path.iterdir())) == 3, "two tasks and the index"
        assert [stream.clear() for stream in streams] == [2, 2]
        files = read_directory(path)
        for each in unresumed(TaskFile(stores[name], file) for name, file in files.items()):
            each.run()
        assert [stream.clear() for stream in streams] == [2, 2]
        for stream in streams:
            stream.close()
