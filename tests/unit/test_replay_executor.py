"""The threads of a buffer: what is cancelled is undone, what goes wrong is told."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import warnings
from collections.abc import Awaitable, Callable

import pytest

from redrb import ConfigError
from redrb.errors import StoreError
from redrb.replay.executor import ReplayExecutor


def run(scenario: Callable[[ReplayExecutor], Awaitable[None]], threads: int = 2) -> None:
    async def main() -> None:
        crew = ReplayExecutor(threads, "crew")
        try:
            await scenario(crew)
            await crew.settle()
        finally:
            crew.close()

    asyncio.run(main())


def test_results_and_errors_come_back() -> None:
    async def scenario(crew: ReplayExecutor) -> None:
        assert await crew.do(lambda: threading.current_thread().name.startswith("crew"))
        with pytest.raises(ZeroDivisionError):
            await crew.do(lambda: 1 // 0)
        undone: list[int] = []
        assert await crew.fetch(lambda: 3, undone.append) == 3
        with pytest.raises(ZeroDivisionError):
            await crew.fetch(lambda: 1 // 0, undone.append)
        assert undone == []

    run(scenario)


@pytest.mark.parametrize("finished", [False, True])
def test_a_fetch_that_nobody_waits_for_is_undone(*, finished: bool) -> None:
    async def scenario(crew: ReplayExecutor) -> None:
        began, go_on, brought = (threading.Event() for _ in range(3))
        undone: list[str] = []

        def job() -> str:
            began.set()
            assert go_on.wait(10)
            brought.set()
            return "result"

        fetching = asyncio.ensure_future(crew.fetch(job, undone.append))
        await asyncio.to_thread(began.wait, 10)
        if finished:  # there is a result, and the waiting task has not seen it yet
            go_on.set()
            brought.wait(10)
        fetching.cancel()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await fetching
        await crew.settle()
        assert undone == ["result"]

    run(scenario)


def test_a_fetch_that_never_began_does_nothing() -> None:
    async def scenario(crew: ReplayExecutor) -> None:
        go_on = threading.Event()
        done: list[int] = []
        busy = asyncio.ensure_future(crew.do(lambda: go_on.wait(10)))
        waiting = asyncio.ensure_future(crew.fetch(lambda: done.append(1), lambda _: None))
        await asyncio.sleep(0.02)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        go_on.set()
        assert await busy
        await crew.settle()
        assert done == []

    run(scenario, threads=1)


def test_what_nobody_waits_for_is_logged_when_it_fails(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(crew: ReplayExecutor) -> None:
        def fail() -> None:
            raise StoreError("Redis is away")

        crew.start(fail, "groups may come again")
        crew.start(lambda: None, "fine")
        await crew.settle()

    with caplog.at_level(logging.WARNING):
        run(scenario)
    assert [record.getMessage() for record in caplog.records] == [
        "groups may come again: Redis is away"
    ]


def test_a_closed_crew_refuses_jobs() -> None:
    async def main() -> None:
        crew = ReplayExecutor(1, "crew")
        crew.close()
        with pytest.raises(ConfigError, match="closed"):
            await crew.do(lambda: 1)

    asyncio.run(main())


def test_a_forked_process_gets_threads_of_its_own() -> None:
    crew = ReplayExecutor(1, "crew")

    async def ask() -> int:
        return await crew.do(os.getpid)

    assert asyncio.run(ask()) == os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads and fork do not mix well
        pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = int(asyncio.run(ask()) != os.getpid())
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    crew.close()
