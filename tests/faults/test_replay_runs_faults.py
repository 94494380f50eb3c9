"""A trainer of XTuner is killed with SIGKILL and goes on with the buffer that Redis has kept."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
import time
from collections import Counter
from itertools import count
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import pytest

from redrb.compat.xtuner import ReplayBuffer, ReplayBufferConfig
from tests.audit import audit
from tests.xtuner_stand_ins import Manager, RolloutState, Status, stand_ins

TASKS = ("code", "math")
PUTS = 4
TAKEN = {"code": 1, "math": 1}
KILLS = 6
FRESH = 10**6
"""A staleness that no group reaches."""

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["redrb.compat.xtuner", "tests.xtuner_stand_ins"])


class Journal:
    """What one process has done, a line for each event; a line is written before the next event."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, event: str, *numbers: int) -> None:
        os.write(self._file, f"{event} {' '.join(map(str, numbers))}\n".encode())


def numbers(folder: Path, event: str) -> list[int]:
    """Return the numbers of an event in the journals of all processes."""
    texts = [path.read_text() for path in folder.glob("journal-*")]
    lines = [line.split() for text in texts for line in text.splitlines()]
    return [int(number) for name, *rest in lines if name == event for number in rest]


def build(url: str, namespace: str, run: str) -> ReplayBuffer:
    plug = ReplayBufferConfig(url, namespace, order="stalest", run=run, lease_ms=5000)
    buffer: ReplayBuffer = plug.build()
    return buffer


async def resume(manager: Any, folder: Path) -> int:
    """Resume the newest checkpoint, as a trainer with `auto_resume` does."""
    newest = folder / "newest"
    step = int(newest.read_text()) if newest.exists() else 0
    if step:
        assert await manager.resume(folder / f"ckpt-step-{step}") == step
    return step


async def fit(manager: Any, folder: Path, begins: Event, *, no_save: bool) -> None:
    """Make and take groups without an end, as the loop of a colocated trainer does."""
    buffer, journal = manager.replay_buffer, Journal(folder / f"journal-{os.getpid()}")
    fresh = count(max(numbers(folder, "putting"), default=-1) + 1)
    for step in count(await resume(manager, folder) + 1):
        await buffer.refresh_staleness(
            dict.fromkeys(TASKS, FRESH), current_train_step=step, statuses=list(Status)
        )
        for _ in range(PUTS):
            number = next(fresh)
            group = [RolloutState(rollout_id=number, response_ids=[1, 2]) for _ in range(2)]
            journal.write("putting", number)
            await buffer.put(
                group,
                TASKS[number % 2],
                model_step=step - 1,
                current_train_step=step,
                stale_threshold=FRESH,
            )
            journal.write("put", number)
        journal.write("taking")
        taken, _ = await buffer.take_batch(TAKEN)
        journal.write("took", *(group[0].rollout_id for each in taken.values() for group in each))
        if step % 2 == 0:
            await manager.save(folder / f"ckpt-step-{step}", step, no_save_replay_buffer=no_save)
            (folder / "newer").write_text(str(step))
            (folder / "newer").replace(folder / "newest")
            begins.set()


def train(url: str, namespace: str, folder: Path, run: str, begins: Event) -> None:
    """Be a trainer's process."""
    sys.modules.update(stand_ins())
    asyncio.run(fit(Manager(build(url, namespace, run)), folder, begins, no_save=run != ""))


async def everything(buffer: ReplayBuffer) -> list[int]:
    """Take all groups, also those that return from the killed processes."""
    found: list[int] = []
    ends = time.monotonic() + 20
    while sum(buffer._tasks.open(task).stats().stored for task in TASKS):
        assert time.monotonic() < ends, "groups of killed processes did not return"
        taken, _ = await buffer.take_batch(dict.fromkeys(TASKS, 1000))
        found += [group[0].rollout_id for each in taken.values() for group in each]
        await asyncio.sleep(0.05)
    for task in TASKS:
        audit(buffer._tasks.open(task))
    return found


@pytest.mark.parametrize("run", ["", "exp7"], ids=["saves-its-buffer", "saves-no-buffer"])
def test_a_trainer_that_is_killed_goes_on_and_loses_no_group_and_takes_none_twice(
    real_url: str,
    namespace: str,
    run: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, module in stand_ins().items():
        monkeypatch.setitem(sys.modules, name, module)
    for kill in range(KILLS):
        begins = processes.Event()
        trainer = processes.Process(
            target=train, args=(real_url, namespace, tmp_path, run, begins), daemon=True
        )
        trainer.start()
        assert begins.wait(60)  # it has saved a checkpoint
        trainer.join(0.013 * kill)
        assert trainer.exitcode is None
        trainer.kill()
        trainer.join(60)

    async def go_on() -> list[int]:
        async with build(real_url, namespace, run) as buffer:
            assert await resume(Manager(buffer), tmp_path) > 0
            assert "goes on with the" in caplog.text
            return await everything(buffer)

    seen = Counter(numbers(tmp_path, "took") + asyncio.run(go_on()))
    ends = [path.read_text().splitlines() for path in tmp_path.glob("journal-*")]
    assert len(ends) == KILLS
    # a process may die while `take_batch` ends: with groups that it has not noted, or not removed
    unnoted = sum(TAKEN.values()) * sum(lines[-1].startswith("taking") for lines in ends)
    last = {number for lines in ends for number in took(lines)[-1]}
    lost = set(numbers(tmp_path, "put")) - set(seen)
    assert len(lost) <= unnoted
    assert {number for number, times in seen.items() if times > 1} <= last
    assert set(seen) <= set(numbers(tmp_path, "putting"))
    assert len(seen) > KILLS * PUTS


def took(lines: list[str]) -> list[list[int]]:
    """Return the batches of one journal."""
    return [[*map(int, line.split()[1:])] for line in lines if line.startswith("took")]
