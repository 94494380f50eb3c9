"""Base class: a thread fetches versions beside generation, a swap loads them between tokens."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager

from redrb.connection.deadline import Deadline
from redrb.connection.stop import Stop
from redrb.errors import RedrbError, StoreClosed

_WAIT_S = 0.5
"""Longest wait for a new version; then the thread checks whether it is to end."""

_PAUSE_S = 0.5
"""Pause after an error."""

_END_S = 2.0
"""How long `_end` waits for the thread; a longer fetch ends in the background."""

_MISSED_S = 60.0
"""How long fetched weights wait for the swap that missed them."""


class BackgroundFetch(ABC):
    """A thread that waits for versions and fetches them, and the swap that loads them.

    The thread and the swaps never wait for each other. If a swap finds nothing ready while a fetch
    is under way, the thread keeps the fetched version until the next swap has loaded it. Without
    that, a thread that fetches all the time, because versions come faster than it can fetch them,
    would never have a version ready.
    """

    def __init__(self, thread_name: str) -> None:
        self._thread_name = thread_name
        self._thread: threading.Thread | None = None
        self._stop = Stop()
        self._loaded = threading.Event()
        self._missed = False

    @abstractmethod
    def _fetch_next(self, wait_s: float) -> None:
        """Wait at most `wait_s` seconds for a version, and fetch it."""

    @property
    @abstractmethod
    def _is_ready(self) -> bool:
        """Whether a fetched version can be loaded."""

    @property
    @abstractmethod
    def _is_fetching(self) -> bool:
        """Whether a fetch is under way."""

    @abstractmethod
    def _load(self) -> bool:
        """Load the fetched version, unless a fetch is under way; returns whether it was loaded."""

    @abstractmethod
    def _failed(self, error: Exception) -> None:
        """Keep, log or drop an error of the thread."""

    def _ended(self) -> None:  # noqa: B027 (most have nothing to release)
        """Release resources at the end of the thread."""

    def _start(self) -> None:
        self._stop = Stop()
        self._thread = threading.Thread(
            target=self._run, args=(self._stop,), name=self._thread_name, daemon=True
        )
        self._thread.start()

    def _end(self) -> None:
        self._stop.ask()
        self._loaded.set()
        if self._thread is not None:
            with Deadline(at_most=_END_S) as deadline:
                self._thread.join(deadline.left_s)

    def _swap_in(self, lock: AbstractContextManager[object]) -> None:
        """Load the fetched version under `lock`, if one is ready; never waits for Redis."""
        if self._is_ready:
            with lock:
                if self._load():
                    self._loaded.set()
                else:
                    self._missed = True
        elif self._is_fetching:
            self._missed = True

    def _run(self, stop: Stop) -> None:
        with Deadline(stop=stop):
            while not stop:
                try:
                    self._fetch_next(_WAIT_S)
                    self._wait_for_missed_swap(stop)
                except Exception as error:  # noqa: BLE001 (a swap or a check raises it)
                    if not (stop and isinstance(error, RedrbError)):
                        self._failed(error)
                    if isinstance(error, StoreClosed):
                        break
                    stop.wait(_PAUSE_S)
            self._ended()

    def _wait_for_missed_swap(self, stop: Stop) -> None:
        """Wait until the ready version is loaded, if a swap has missed it."""
        if not self._missed:
            return
        self._missed = False
        deadline = time.monotonic() + _MISSED_S
        while not stop and (left := deadline - time.monotonic()) > 0:
            self._loaded.clear()
            if stop or not self._is_ready:
                break
            self._loaded.wait(left)
