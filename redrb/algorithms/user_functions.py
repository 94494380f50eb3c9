"""Calls of the user's functions, plain ones and coroutines: results are given as they are there."""

from __future__ import annotations

import asyncio
import atexit
import inspect
import logging
import math
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias, TypeVar

import torch

from redrb.forks import in_child
from redrb.words import counted

R = TypeVar("R")

Results: TypeAlias = list[tuple[int, Any]]
"""Numbers of calls, each with what the function returned, or with its exception."""

TOGETHER_S = 0.1
"""Results that plain functions give within so many seconds come together."""

GRACE_S = 10.0
"""How long the time limit of a coroutine may be late, because its event loop is busy."""

FAILURES = (Exception, SystemExit)
"""Errors by which a call of the user's function fails alone. A coroutine may raise CancelledError,
too, although nobody has cancelled it."""

_JOIN_S = 2.0
"""How long a process that ends waits for the event loop's thread."""

_log = logging.getLogger("redrb")


class Calls:
    """Calls functions one after the other; coroutines run at the same time, each for a while.

    A call that raises, or lasts longer than `timeout` seconds, gives its exception as the result.
    """

    def __init__(self, timeout: float, *, stop_timeout: float = math.inf) -> None:
        """Set the time limits; after `stop`, coroutines get `stop_timeout` seconds to end."""
        self._timeout, self._stop_timeout = timeout, stop_timeout
        self._stopped = False
        self._done: SimpleQueue[tuple[int, Any] | None] = SimpleQueue()

    def stop(self) -> None:
        """Begin no further call; another thread or a signal handler may call it."""
        self._stopped = True
        self._done.put(None)

    def results(self, calls: Iterable[Callable[[], Any]]) -> Iterator[Results]:
        """Make calls and yield their results, those that are there first go first.

        After `stop`, calls that were not made, or do not end in time, have no result.
        """
        done = self._done = SimpleQueue()
        running: dict[int, Future[None]] = {}
        ready: Results = []
        sent_at = time.monotonic()
        try:
            for number, call in enumerate(calls):
                if self._stopped:
                    break
                found = attempt(call)
                if inspect.isawaitable(found):
                    running[number] = submit(self._put(number, found, done))
                    continue
                ready.append((number, found))
                if time.monotonic() - sent_at >= TOGETHER_S:
                    yield ready
                    ready, sent_at = [], time.monotonic()
            if ready:
                yield ready
            yield from self._awaited(running)
        finally:
            for future in running.values():
                future.cancel()

    def result(self, call: Callable[[], Any]) -> Any:
        """Return the result of one call, or its exception."""
        return next(found for part in self.results([call]) for _, found in part)

    def _awaited(self, running: dict[int, Future[None]]) -> Iterator[Results]:
        """Yield the results of coroutines; at the end, those that run longer fail."""
        deadline, left = time.monotonic() + self._timeout + GRACE_S, set(running)
        ending = False
        while left:
            if self._stopped and not ending:
                ending = True
                deadline = min(deadline, time.monotonic() + self._stop_timeout)
            try:
                arrived = [self._done.get(timeout=max(0.0, deadline - time.monotonic()))]
            except Empty:
                calls = counted(len(left), "call", "are")
                _log.warning("%s given up: no end came in time", calls)
                late = TimeoutError("it did not end in time, and blocks its event loop")
                if not self._stopped:
                    yield [(number, late) for number in sorted(left)]
                return
            while not self._done.empty():
                arrived.append(self._done.get())
            if ready := [each for each in arrived if each is not None]:
                left -= {number for number, _ in ready}
                yield ready
                if not self._stopped:  # a loop that is busy goes on as long as results come
                    deadline = time.monotonic() + self._timeout + GRACE_S

    async def _put(
        self, number: int, call: Awaitable[Any], done: SimpleQueue[tuple[int, Any] | None]
    ) -> None:
        try:
            async with asyncio.timeout(self._timeout):
                found = await call
        except (*FAILURES, asyncio.CancelledError) as error:  # its group is filtered
            found = failure_of(error)
        done.put((number, found))


def attempt(call: Callable[[], Any]) -> Any:
    """Return the result of a call, or its exception."""
    try:
        return call()
    except FAILURES as error:  # its group is filtered
        return failure_of(error)


def failure_of(error: BaseException) -> Exception:
    """Return why a call of the user's function failed; other calls go on, also after SystemExit."""
    if isinstance(error, Exception):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__)


_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


def submit(coroutine: Coroutine[Any, Any, R]) -> Future[R]:
    """Run a coroutine in the background loop, which all callers of a process share.

    It computes no gradients there. Clients that a coroutine function keeps, such as HTTP sessions,
    stay bound to this one loop.
    """
    global _loop
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            thread = threading.Thread(
                target=_run, args=(_loop,), name="redrb-event-loop", daemon=True
            )
            thread.start()
            atexit.register(_end, _loop, thread)
        return asyncio.run_coroutine_threadsafe(coroutine, _loop)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    # of the whole thread: a block in one coroutine would also begin and end in the others
    torch.set_grad_enabled(False)
    asyncio.set_event_loop(loop)
    ended = False
    while not ended:
        with suppress(SystemExit):  # of a task, which has it as its error: the other tasks go on
            loop.run_forever()
            ended = True
    loop.close()


def _end(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    loop.call_soon_threadsafe(loop.stop)
    thread.join(_JOIN_S)


def _forget() -> None:
    """In a forked child, which has none of its parent's threads."""
    global _lock, _loop
    atexit.unregister(_end)
    _lock, _loop = threading.Lock(), None


in_child(_forget)
