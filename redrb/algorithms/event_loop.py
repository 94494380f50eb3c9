"""An event loop in a background thread, for coroutine functions that synchronous code calls."""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from redrb.forks import in_child

R = TypeVar("R")

_JOIN_S = 2.0
"""How long a process that ends waits for the thread."""


class _LoopThread:
    """One event loop and its thread, until the process ends."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="redrb-event-loop", daemon=True)
        self._thread.start()

    def end(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        # of the whole thread: a block in one coroutine would also begin and end in the others
        torch.set_grad_enabled(False)
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        self.loop.close()


_lock = threading.Lock()
_thread: _LoopThread | None = None


def _forget() -> None:
    """In a forked child, which has none of its parent's threads."""
    global _lock, _thread
    if _thread is not None:
        atexit.unregister(_thread.end)
    _lock, _thread = threading.Lock(), None


in_child(_forget)


def submit(coroutine: Coroutine[Any, Any, R]) -> Future[R]:
    """Run a coroutine in the background loop, which all callers of a process share.

    It computes no gradients there. Clients that a coroutine function keeps, such as HTTP sessions,
    stay bound to this one loop.
    """
    global _thread
    with _lock:
        if _thread is None:
            _thread = _LoopThread()
            atexit.register(_thread.end)
        return asyncio.run_coroutine_threadsafe(coroutine, _thread.loop)
