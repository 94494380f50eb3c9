"""Runs blocking calls of a buffer in its threads; a cancelled call loses no result."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from redrb.connection.stopping import Stop, stoppable
from redrb.errors import ConfigError, RedrbError

T = TypeVar("T")

_log = logging.getLogger("redrb")


class ReplayExecutor:
    """A pool of threads for one buffer; the default pool of the event loop stays free.

    Attributes:
        closed: Whether it accepts no further jobs.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._threads = threads
        self._name = name
        self.closed = False
        self._stops: set[Stop] = set()
        self._make_pool()

    def _make_pool(self) -> None:
        """Make the threads; again in a forked process, which has none of its parent's threads."""
        self._pid = os.getpid()
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix=self._name)
        self._lock = threading.Lock()
        self._running: set[Future[Any]] = set()

    async def run(self, job: Callable[[], T]) -> T:
        """Run a job in a thread and return its result.

        A cancelled caller does not wait for it; a job that has begun is finished all the same.
        """
        return await asyncio.wrap_future(self._submit(job))

    async def run_stoppable(self, job: Callable[[], T]) -> T:
        """Run a job in a thread; a cancelled caller, or `stop`, ends its waits for room."""
        stop = Stop()

        def run() -> T:
            with stoppable(stop):
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

    async def run_undoable(self, job: Callable[[], T], undo: Callable[[T], None]) -> T:
        """Run a job and return its result; if the caller is cancelled, undo it in a thread."""
        undoable = _UndoableJob(job, undo)
        future = self._submit(undoable.run)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if undoable.cancel():
                self._submit(lambda: undo(future.result()))
            raise

    def run_in_background(self, job: Callable[[], None], failure: str) -> None:
        """Run a job for which no caller waits; an error is logged after the text `failure`."""

        def report(done: Future[None]) -> None:
            error = done.exception()
            if isinstance(error, RedrbError):
                _log.warning("%s: %s", failure, error)
            elif error is not None:
                _log.error("%s", failure, exc_info=error)

        self._submit(job).add_done_callback(report)

    async def drain(self) -> None:
        """Wait until all jobs that were begun are finished."""
        while True:
            with self._lock:
                running = [asyncio.wrap_future(future) for future in self._running]
            if not running:
                return
            await asyncio.wait(running)
            for done in running:
                if not done.cancelled():
                    done.exception()  # the job's caller gets the error; asyncio wants it read here

    def close(self) -> None:
        """Accept no further jobs; the threads end after the jobs that were begun."""
        self.closed = True
        self._pool.shutdown(wait=False)

    def _submit(self, job: Callable[[], T]) -> Future[T]:
        if self.closed:
            raise ConfigError("the buffer is closed: make another one.")
        if self._pid != os.getpid():
            self._make_pool()
        future = self._pool.submit(job)
        with self._lock:
            self._running.add(future)
        future.add_done_callback(self._forget)
        return future

    def _forget(self, future: Future[Any]) -> None:
        with self._lock:
            self._running.discard(future)


class _UndoableJob(Generic[T]):
    """A job whose result is undone if its caller was cancelled meanwhile."""

    def __init__(self, job: Callable[[], T], undo: Callable[[T], None]) -> None:
        self._job = job
        self._undo = undo
        self._lock = threading.Lock()
        self._finished = False
        self._cancelled = False

    def run(self) -> T:
        """Do the job, in a thread."""
        result = self._job()
        with self._lock:
            self._finished = True
        if self._cancelled:
            self._undo(result)
        return result

    def cancel(self) -> bool:
        """Note that the caller was cancelled; True if the caller has to undo the result."""
        with self._lock:
            self._cancelled = not self._finished
            return self._finished
