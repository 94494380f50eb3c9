"""A buffer is resumed, each group once: beside makers and other resumes, and when killed."""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

import redrb
from redrb import ReplayBuffer
from redrb.connection import Client
from redrb.errors import ConfigError, RedrbError
from tests.audit import audit

TASKS = ("a", "b", "c")
GROUPS = 60
ROUNDS = 8

Found = dict[str, set[int]]

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["redrb.compat.xtuner"])


@pytest.fixture
def client(real_url: str) -> Iterator[Client]:
    with redrb.connect(real_url) as client:
        yield client


def save(client: Client, namespace: str, path: Path, first: int = 0) -> Found:
    """Save a buffer of three tasks; returns the ids of their groups."""
    found: Found = {task: set() for task in TASKS}

    async def main() -> None:
        async with ReplayBuffer(
            client, namespace=f"{namespace}-s{first}", order="stalest"
        ) as buffer:
            for number in range(first, first + GROUPS):
                task = TASKS[number % 3]
                await buffer.put([{"id": number}], task)
                found[task].add(number)
            await buffer.save(path)

    asyncio.run(main())
    return found


def resume(client: Client, namespace: str, path: Path) -> RedrbError | None:
    """Resume a buffer in another event loop; returns its error."""

    async def main() -> None:
        async with ReplayBuffer(client, namespace=namespace, order="stalest") as buffer:
            await buffer.resume(path)

    try:
        asyncio.run(main())
    except RedrbError as error:
        return error
    return None


def contents(client: Client, namespace: str) -> Found:
    """Return the ids of all groups of a buffer, after a check of every counter."""
    found: Found = {}

    async def main() -> None:
        async with ReplayBuffer(client, namespace=namespace, order="stalest") as buffer:
            for task in TASKS:
                audit(buffer._tasks.open(task))
                groups = await buffer.get(10**6, task, "completed")
                found[task] = {rollout["id"] for (rollout,) in groups}
                assert len(found[task]) == len(groups)
                await buffer._executor.drain()
                buffer._tasks.open(task).clear()

    asyncio.run(main())
    return found


def both(one: Found, other: Found) -> Found:
    return {task: one[task] | other[task] for task in TASKS}


def test_a_resume_beside_a_maker_loses_no_group(
    client: Client, namespace: str, tmp_path: Path
) -> None:
    groups = save(client, namespace, tmp_path)
    outcomes = set()
    for attempt in range(ROUNDS):
        own = f"{namespace}-{attempt}"
        put: Found = {task: set() for task in TASKS}
        begun, ended = threading.Event(), threading.Event()
        late_s = 0.01 * attempt

        def make(
            own: str = own,
            put: Found = put,
            begun: threading.Event = begun,
            ended: threading.Event = ended,
            late_s: float = late_s,
        ) -> None:
            async def main() -> None:
                async with ReplayBuffer(client, namespace=own, order="stalest") as buffer:
                    await asyncio.sleep(late_s)
                    number = 1000
                    while not ended.is_set():
                        task = TASKS[number % 3]
                        await buffer.put([{"id": number}], task)
                        put[task].add(number)
                        begun.set()
                        number += 1

            asyncio.run(main())

        maker = threading.Thread(target=make)
        maker.start()
        if attempt == 0:  # it is refused where the maker was first
            assert begun.wait(30)
        error = resume(client, own, tmp_path)
        time.sleep(0.02)
        ended.set()
        maker.join(30)
        assert error is None or isinstance(error, ConfigError)
        assert contents(client, own) == (both(put, groups) if error is None else put), attempt
        outcomes.add(error is None)
    assert False in outcomes


def test_of_two_resumes_at_a_time_one_succeeds_whole(
    client: Client, namespace: str, tmp_path: Path
) -> None:
    saves = {tmp_path / str(first): first for first in (0, 500)}
    groups = {path: save(client, namespace, path, first) for path, first in saves.items()}
    one, other = saves
    dice = random.Random(0)
    for attempt in range(ROUNDS):
        own = f"{namespace}-{attempt}"
        paths = [one, other if attempt % 2 else one]
        errors: dict[int, RedrbError | None] = {}

        def run(
            place: int,
            late_s: float,
            own: str = own,
            paths: list[Path] = paths,
            errors: dict[int, RedrbError | None] = errors,
        ) -> None:
            time.sleep(late_s)
            errors[place] = resume(client, own, paths[place])

        threads = [
            threading.Thread(target=run, args=(place, dice.random() * 0.05)) for place in (0, 1)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        won = [place for place in (0, 1) if errors[place] is None]
        assert won, errors
        assert len({paths[place] for place in won}) == 1
        assert contents(client, own) == groups[paths[won[0]]]


def resume_in_process(url: str, namespace: str, path: Path, begins: Event) -> None:
    with redrb.connect(url) as client:
        begins.set()
        error = resume(client, namespace, path)
        if error is not None:
            raise error


def test_a_resume_that_is_killed_goes_on_when_it_is_repeated(
    client: Client, real_url: str, namespace: str, tmp_path: Path
) -> None:
    groups = save(client, namespace, tmp_path)
    killed = 0
    for attempt in range(6):
        own = f"{namespace}-{attempt}"
        begins = processes.Event()
        process = processes.Process(
            target=resume_in_process, args=(real_url, own, tmp_path, begins), daemon=True
        )
        process.start()
        assert begins.wait(60)
        process.join(0.01 * attempt)
        process.kill()
        process.join(60)
        assert process.exitcode in (0, -signal.SIGKILL)
        whole = process.exitcode == 0
        found = size(client, own)
        assert found == GROUPS if whole else found <= GROUPS
        killed += not whole
        assert resume(client, own, tmp_path) is None
        assert contents(client, own) == groups
    assert killed >= 2


def size(client: Client, namespace: str) -> int:
    async def main() -> int:
        async with ReplayBuffer(client, namespace=namespace, order="stalest") as buffer:
            return await buffer.size()

    return asyncio.run(main())
