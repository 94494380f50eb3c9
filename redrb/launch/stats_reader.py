"""Reads a task's counters for the screen, in a thread: Redis may be away."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

from redrb.connection import connect
from redrb.errors import StoreError, UnknownTask
from redrb.recipe.recipe import Recipe
from redrb.stream import StreamStats
from redrb.stream.task.inspection import task_stats

_CONNECT_TIMEOUT_S = 2.0
_JOIN_S = 2.0


class StatsReader:
    """Keeps the newest counters of a task.

    Attributes:
        newest: The counters; None while they cannot be read.
    """

    def __init__(self, url: str, recipe: Recipe, every_s: float) -> None:
        """Prepare it; a `with` block runs it.

        Args:
            url: Where Redis is.
            recipe: Names task and namespace.
            every_s: Seconds between two looks.
        """
        self.newest: StreamStats | None = None
        self._url, self._recipe, self._every_s = url, recipe, every_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="redrb-run-stats", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        task, namespace = self._recipe.task_name, self._recipe.namespace
        while not self._over.is_set():
            try:
                with connect(self._url, retry_s=0, connect_timeout=_CONNECT_TIMEOUT_S) as client:
                    while not self._over.wait(self._every_s):
                        try:
                            self.newest = task_stats(
                                client, task, namespace=namespace, group="default"
                            )
                        except UnknownTask:  # the trainer has not begun
                            self.newest = None
            except StoreError:  # the screen leaves the counters out; the workers report the error
                self.newest = None
                self._over.wait(self._every_s)
