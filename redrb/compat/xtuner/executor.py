"""Runs blocking calls of a buffer in its threads; a cancelled call loses no result."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from redrb.connection.deadline import Deadline
from redrb.connection.stop import Stop
from redrb.errors import ConfigError
from redrb.forks import in_child

T = TypeVar("T")

_log = logging.getLogger("redrb")


class ReplayExecutor:
    """A pool of threads for one buffer; the default pool of the event loop stays free."""

    def __init__(self, threads: int, name: str) -> None:
        self._threads = threads
        self._name = name
        self.closed = self._ended = False
        self._stops: set[Stop] = set()
        self._make_pool()
        in_child(self._make_pool)

    def _make_pool(self) -> None:
        """Make the threads; again in a forked process, which has none of its parent's threads."""
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix=self._name)
        self._lock = threading.Lock()
        self._running: set[Future[Any]] = set()

    async def run(self, job: Callable[[], T]) -> T:
        """Run a job in a thread and return its result, or raise ConfigError.

        A cancelled caller does not wait for it; a job that has begun is finished all the same.
        """
        return await asyncio.wrap_future(self._begin(job))

    async def run_stoppable(self, job: Callable[[], T]) -> T:
        """Run a job in a thread; a cancelled caller, or `stop`, ends its waits for room."""
        stop = Stop()

        def run() -> T:
            with Deadline(stop=stop):
                return job()

        self._stops.add(stop)
        try:
            return await self.run(run)
        except asyncio.CancelledError:
            stop.ask()
            raise
        finally:
            self._stops.discard(stop)

    def stop(self) -> None:
        """End the waits of all stoppable jobs, also of those that have not begun."""
        for stop in tuple(self._stops):
            stop.ask()

    async def run_undoable(
        self, job: Callable[[], T], *, undo: Callable[[T], None], confirm: Callable[[T], None]
    ) -> T:
        """Run a job and return its result, which is confirmed in a thread once the caller has it.

        If the caller is cancelled, the result is undone instead. `drain` waits for either.
        """
        future = self._begin(job)
        call = self._watch(Future[None]())

        def end(last: Future[Any]) -> None:
            if last is not future and (error := last.exception()) is not None:
                _log.error("the end of a call failed", exc_info=error)
            call.set_result(None)

        def undone(done: Future[T]) -> None:
            failed = done.cancelled() or done.exception() is not None
            last: Future[Any] = done if failed else self._pool.submit(undo, done.result())
            last.add_done_callback(end)

        try:
            result = await asyncio.wrap_future(future)
        except BaseException:  # the caller was cancelled, or the job failed
            future.add_done_callback(undone)
            raise
        self._pool.submit(confirm, result).add_done_callback(end)
        return result

    async def drain(self) -> None:
        """Wait until all calls that have begun by now are finished; later ones may go on."""
        with self._lock:
            running = [asyncio.wrap_future(future) for future in self._running]
        if running:
            await asyncio.wait(running)
        for done in running:
            if not done.cancelled():
                done.exception()  # the job's caller gets the error; asyncio wants it read here

    async def close(self, last: Callable[[], None] = lambda: None) -> None:
        """Refuse further calls, wait for those that have begun, run `last`, and end the threads."""
        self.closed = True
        await self.drain()
        if not self._ended:
            await asyncio.wrap_future(self._pool.submit(last))
            self._ended = True
            self._pool.shutdown(wait=False)

    def _begin(self, job: Callable[[], T]) -> Future[T]:
        if self.closed:
            raise ConfigError("the buffer is closed: make another one.")
        return self._watch(self._pool.submit(job))

    def _watch(self, future: Future[T]) -> Future[T]:
        with self._lock:
            self._running.add(future)
        future.add_done_callback(self._forget)
        return future

    def _forget(self, future: Future[Any]) -> None:
        with self._lock:
            self._running.discard(future)
