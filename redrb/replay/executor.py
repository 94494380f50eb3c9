"""A few threads that do what would block an event loop, and lose nothing when it stops waiting."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from redrb.errors import ConfigError, RedrbError

T = TypeVar("T")

_log = logging.getLogger("redrb")


class ReplayExecutor:
    """A bounded number of threads of one buffer; the event loop's own are left alone.

    Attributes:
        closed: Whether it does no further jobs.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._threads = threads
        self._name = name
        self.closed = False
        self._begin()

    def _begin(self) -> None:
        """Get threads: at first, and in a forked process, which has none of its parent's."""
        self._pid = os.getpid()
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix=self._name)
        self._lock = threading.Lock()
        self._working: set[Future[Any]] = set()

    async def do(self, job: Callable[[], T]) -> T:
        """Return what `job` does in a thread.

        Whoever is cancelled does not wait for it: a job that runs is done all the same.
        """
        return await asyncio.wrap_future(self._submit(job))

    async def fetch(self, job: Callable[[], T], undo: Callable[[T], None]) -> T:
        """Return what `job` brings; cancelled meanwhile, it is undone in a thread."""
        handover = _Handover(job, undo)
        future = self._submit(handover.run)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if handover.abandon():
                self._submit(lambda: undo(future.result()))
            raise

    def start(self, job: Callable[[], None], what: str) -> None:
        """Do a job that nobody waits for; what goes wrong is logged."""

        def report(done: Future[None]) -> None:
            error = done.exception()
            if isinstance(error, RedrbError):
                _log.warning("%s: %s", what, error)
            elif error is not None:
                _log.error("%s", what, exc_info=error)

        self._submit(job).add_done_callback(report)

    async def settle(self) -> None:
        """Wait until all that was begun is done."""
        while True:
            with self._lock:
                working = [asyncio.wrap_future(future) for future in self._working]
            if not working:
                return
            await asyncio.wait(working)
            for done in working:
                if not done.cancelled():
                    done.exception()  # whoever waits for it gets it; here it only counts as seen

    def close(self) -> None:
        """Let the threads end when they have done what is begun."""
        self.closed = True
        self._pool.shutdown(wait=False)

    def _submit(self, job: Callable[[], T]) -> Future[T]:
        if self.closed:
            raise ConfigError("the buffer is closed: make another one.")
        if self._pid != os.getpid():
            self._begin()
        future = self._pool.submit(job)
        with self._lock:
            self._working.add(future)
        future.add_done_callback(self._forget)
        return future

    def _forget(self, future: Future[Any]) -> None:
        with self._lock:
            self._working.discard(future)


class _Handover(Generic[T]):
    """A result on its way to whoever waits for it, and back when nobody does any more."""

    def __init__(self, job: Callable[[], T], undo: Callable[[T], None]) -> None:
        self._job = job
        self._undo = undo
        self._lock = threading.Lock()
        self._brought = False
        self._abandoned = False

    def run(self) -> T:
        """Do the job, in a thread."""
        result = self._job()
        with self._lock:
            self._brought = True
        if self._abandoned:
            self._undo(result)
        return result

    def abandon(self) -> bool:
        """Note that nobody waits any more; True when there is a result that is to be undone."""
        with self._lock:
            self._abandoned = not self._brought
            return self._brought
