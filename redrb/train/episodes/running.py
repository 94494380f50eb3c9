"""Runs coroutines of the user: it ends although threads and tasks do not, and names who blocks."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

_log = logging.getLogger("redrb")

T = TypeVar("T")

_LOOK_S, _LATE_S, _LATE_LOOKS = 1.0, 0.5, 3
"""A blocked loop is late by so much at each of so many looks; a first import is late once."""


async def warn_if_blocked(name: str) -> None:
    """Warn once if a coroutine function of the user blocks the event loop in which this runs.

    The loop measures itself, by how late it goes on after a pause.
    """
    loop = asyncio.get_running_loop()
    late: list[float] = []
    while len(late) < _LATE_LOOKS:
        due = loop.time() + _LOOK_S
        await asyncio.sleep(_LOOK_S)
        late_s = loop.time() - due
        late = [*late, late_s] if late_s >= _LATE_S else []
    _log.warning(
        "%s blocks its event loop, which stood still for %.1f of %.1f s: its calls run one after "
        "the other. Await what takes long: use async clients, such as openai.AsyncOpenAI or "
        "httpx.AsyncClient, and `await asyncio.to_thread(function, ...)` for what blocks",
        name,
        sum(late),
        sum(late) + len(late) * _LOOK_S,
    )


def run_and_end(coroutine: Coroutine[Any, Any, T], seconds: float) -> T:
    """Run a coroutine in a new event loop, as `asyncio.run` does, and return its result.

    Args:
        seconds: Time that the tasks which it leaves behind get to end after they were cancelled.
            Threads of `asyncio.to_thread` are not waited for.
    """
    loop = asyncio.new_event_loop()
    loop.set_default_executor(_DaemonThreads())
    try:
        return loop.run_until_complete(coroutine)
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            _, left = loop.run_until_complete(asyncio.wait(left, timeout=seconds))
        if left:
            _log.warning("tasks that go on after they were cancelled are given up: %d", len(left))
        loop.close()


class _DaemonThreads(ThreadPoolExecutor):
    """Threads that end with the process, and that nobody waits for.

    Those of a `ThreadPoolExecutor` keep the process until they end, and a thread cannot be ended
    from outside.
    """

    def __init__(self) -> None:
        super().__init__()
        self._free = threading.Semaphore(self._max_workers)

    def submit(self, function: Callable[..., T], /, *args: Any, **options: Any) -> Future[T]:
        """Call a function in a thread, as soon as fewer than the most threads are busy."""
        future: Future[T] = Future()
        call = partial(function, *args, **options)
        threading.Thread(target=self._call, args=(future, call), daemon=True).start()
        return future

    def _call(self, future: Future[T], call: Callable[[], T]) -> None:
        with self._free:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = call()
            except BaseException as error:  # noqa: BLE001 (the coroutine that waits gets it)
                future.set_exception(error)
            else:
                future.set_result(result)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: FBT001
        """Return at once."""
