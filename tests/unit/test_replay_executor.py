"""The threads of a buffer: cancelled calls are undone, errors in the background are logged."""

from __future__ import annotations

import asyncio
import os
import threading
import warnings
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from redrb import ConfigError
from redrb.compat.xtuner.executor import ReplayExecutor


def run(scenario: Callable[[ReplayExecutor], Awaitable[None]], threads: int = 2) -> None:
    async def main() -> None:
        executor = ReplayExecutor(threads, "replay")
        try:
            await scenario(executor)
            await executor.drain()
        finally:
            await executor.close()

    asyncio.run(main())


def test_results_and_errors_come_back() -> None:
    async def scenario(executor: ReplayExecutor) -> None:
        assert await executor.run(lambda: threading.current_thread().name.startswith("replay"))
        with pytest.raises(ZeroDivisionError):
            await executor.run(lambda: 1 // 0)
        undone, confirmed = list[int](), list[int]()
        ways = {"undo": undone.append, "confirm": confirmed.append}
        assert await executor.run_undoable(lambda: 3, **ways) == 3
        with pytest.raises(ZeroDivisionError):
            await executor.run_undoable(lambda: 1 // 0, **ways)
        assert await executor.run_stoppable(lambda: 4) == 4
        with pytest.raises(ZeroDivisionError):
            await executor.run_stoppable(lambda: 1 // 0)
        assert executor._stops == set()  # each put makes one: else they would pile up
        await executor.drain()
        assert undone == []
        assert confirmed == [3]

    run(scenario)


@pytest.mark.parametrize("finished", [False, True])
def test_the_result_of_a_cancelled_call_is_undone(*, finished: bool) -> None:
    async def scenario(executor: ReplayExecutor) -> None:
        began, go_on, has_result = (threading.Event() for _ in range(3))
        undone, confirmed = list[str](), list[str]()

        def job() -> str:
            began.set()
            assert go_on.wait(10)
            has_result.set()
            return "result"

        call = asyncio.ensure_future(
            executor.run_undoable(job, undo=undone.append, confirm=confirmed.append)
        )
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
        assert confirmed == []

    run(scenario)


def test_a_drain_waits_for_calls_that_have_begun_and_for_no_later_ones() -> None:
    async def scenario(executor: ReplayExecutor) -> None:
        first, later, confirmed = (threading.Event() for _ in range(3))
        taking = asyncio.ensure_future(
            executor.run_undoable(
                lambda: first.wait(10), undo=lambda _: None, confirm=lambda _: confirmed.set()
            )
        )
        await asyncio.sleep(0)
        draining = asyncio.ensure_future(executor.drain())
        await asyncio.sleep(0)
        busy = asyncio.ensure_future(executor.run(lambda: later.wait(10)))
        await asyncio.sleep(0)
        first.set()
        assert await taking
        await asyncio.wait_for(draining, 5)
        assert confirmed.is_set()
        assert not busy.done()
        later.set()
        assert await busy

    run(scenario)


def test_close_refuses_calls_and_finishes_those_that_have_begun() -> None:
    async def main() -> None:
        executor = ReplayExecutor(2, "replay")
        go_on, done = threading.Event(), list[str]()
        taking = asyncio.ensure_future(
            executor.run_undoable(
                lambda: go_on.wait(10),
                undo=lambda _: done.append("undone"),
                confirm=lambda _: done.append("confirmed"),
            )
        )
        await asyncio.sleep(0)
        closings = [
            asyncio.ensure_future(executor.close(lambda: done.append("closed"))) for _ in range(2)
        ]
        await asyncio.sleep(0)
        with pytest.raises(ConfigError, match="closed"):
            await executor.run(lambda: 1)
        go_on.set()
        assert await taking
        await asyncio.wait_for(asyncio.gather(*closings), 5)
        assert done[:2] == ["confirmed", "closed"]
        await executor.close()

    asyncio.run(main())


def test_a_cancelled_call_that_never_began_does_nothing() -> None:
    async def scenario(executor: ReplayExecutor) -> None:
        go_on = threading.Event()
        done: list[Any] = []
        busy = asyncio.ensure_future(executor.run(lambda: go_on.wait(10)))
        waiting = asyncio.ensure_future(
            executor.run_undoable(lambda: done.append(1), undo=done.append, confirm=done.append)
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
    asyncio.run(executor.close())
