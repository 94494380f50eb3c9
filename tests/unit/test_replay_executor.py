"""The threads of a buffer: cancelled calls are undone, errors in the background are logged."""

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
        executor = ReplayExecutor(threads, "replay")
        try:
            await scenario(executor)
            await executor.drain()
        finally:
            executor.close()

    asyncio.run(main())


def test_results_and_errors_come_back() -> None:
    async def scenario(executor: ReplayExecutor) -> None:
        assert await executor.run(lambda: threading.current_thread().name.startswith("replay"))
        with pytest.raises(ZeroDivisionError):
            await executor.run(lambda: 1 // 0)
        undone: list[int] = []
        assert await executor.run_undoable(lambda: 3, undone.append) == 3
        with pytest.raises(ZeroDivisionError):
            await executor.run_undoable(lambda: 1 // 0, undone.append)
        assert undone == []

    run(scenario)


@pytest.mark.parametrize("finished", [False, True])
def test_the_result_of_a_cancelled_call_is_undone(*, finished: bool) -> None:
    async def scenario(executor: ReplayExecutor) -> None:
        began, go_on, has_result = (threading.Event() for _ in range(3))
        undone: list[str] = []

        def job() -> str:
            began.set()
            assert go_on.wait(10)
            has_result.set()
            return "result"

        call = asyncio.ensure_future(executor.run_undoable(job, undone.append))
        await asyncio.to_thread(began.wait, 10)
        if finished:  # there is a result, and the waiting task has not seen it yet
            go_on.set()
            has_result.wait(10)
        call.cancel()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await call
        await executor.drain()
        assert undone == ["result"]

    run(scenario)


def test_a_cancelled_call_that_never_began_does_nothing() -> None:
    async def scenario(executor: ReplayExecutor) -> None:
        go_on = threading.Event()
        done: list[int] = []
        busy = asyncio.ensure_future(executor.run(lambda: go_on.wait(10)))
        waiting = asyncio.ensure_future(
            executor.run_undoable(lambda: done.append(1), lambda _: None)
        )
        await asyncio.sleep(0.02)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        go_on.set()
        assert await busy
        await executor.drain()
        assert done == []

    run(scenario, threads=1)


def test_an_error_in_the_background_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(executor: ReplayExecutor) -> None:
        def fail() -> None:
            raise StoreError("Redis is away")

        executor.run_in_background(fail, "groups may come again")
        executor.run_in_background(lambda: None, "fine")
        await executor.drain()

    with caplog.at_level(logging.WARNING):
        run(scenario)
    assert [record.getMessage() for record in caplog.records] == [
        "groups may come again: Redis is away"
    ]


def test_a_closed_executor_refuses_jobs() -> None:
    async def main() -> None:
        executor = ReplayExecutor(1, "replay")
        executor.close()
        with pytest.raises(ConfigError, match="closed"):
            await executor.run(lambda: 1)

    asyncio.run(main())


def test_a_forked_process_makes_new_threads() -> None:
    executor = ReplayExecutor(1, "replay")

    async def ask() -> int:
        return await executor.run(os.getpid)

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
    executor.close()
