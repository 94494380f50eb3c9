"""`run_and_end`: runs a coroutine, and ends although threads and tasks of the user do not."""

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
