"""`Admission`: the right to begin some groups, as `stream.admit` returns it."""

from __future__ import annotations

import bisect
import threading
import weakref
from collections.abc import Sequence

from redrb.scopes import Entered
from redrb.stream.admission.maker import Maker
from redrb.stream.put.rights import Rights, RightsSource, too_few


class Admission(RightsSource, Entered):
    """Rights to begin groups: one for each; safe among threads.

    Leaving its block returns the rights that no put has used. Rights of a put that failed stay
    until then, so that the put can be repeated.

    Attributes:
        task: Name of the task.
        count: Rights that were given.
        version: Weight version that the task knew then; None: none.
    """

    def __init__(
        self,
        maker: Maker,
        task: str,
        task_prefix: str,
        series: str,
        numbers: Sequence[int],
        version: int | None,
    ) -> None:
        self.task = task
        self.task_prefix = task_prefix
        self.count = len(numbers)
        self.version = version
        self._maker = maker
        self._series = series
        self._left = list(numbers)
        self._over = False
        self._holder = maker.name
        self._lock = threading.Lock()
        self._finalizer = weakref.finalize(self, _drop, maker, series, self._left, maker.name)
        self._finalizer.atexit = False

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def __repr__(self) -> str:
        return f"<redrb.Admission {self.left} of {self.count} rights of {self.task}>"

    @property
    def left(self) -> int:
        """Rights that no put has used yet."""
        return len(self._left)

    def cancel(self) -> None:
        """Return the rights that are left; further calls do nothing.

        While Redis is away the heartbeat returns them later. In a forked process nothing is
        returned: the rights belong to its parent.

        Raises:
            StoreError: The server answered with an error.
        """
        with self._lock:
            self._over = True
            numbers, self._left[:] = tuple(self._left), []
        if numbers and self._is_here:
            self._maker.give_back(self._series, numbers)

    def hand_over(self, count: int) -> Rights:
        """Hand over rights to a put, lowest numbers first."""
        with self._lock:
            if count > len(self._left):
                raise too_few(self.task, count, len(self._left))
            numbers, self._left[:count] = tuple(self._left[:count]), []
        return Rights(self.task, self.task_prefix, self._series, numbers, source=self)

    def hand_back(self, numbers: Sequence[int]) -> None:
        """Take rights back that a put has not used; after the block they return to the task."""
        with self._lock:
            if not self._over:
                for number in numbers:
                    bisect.insort(self._left, number)
                return
        if self._is_here:
            self._maker.drop(self._series, numbers)

    def note_ended(self, numbers: Sequence[int]) -> None:
        """Note that rights have ended."""
        if self._is_here:
            self._maker.end(self._series, numbers)

    @property
    def _is_here(self) -> bool:
        return self._holder == self._maker.name


def _drop(maker: Maker, series: str, left: list[int], holder: str) -> None:
    """Return the rights of an object that is deleted without `cancel`."""
    if left and holder == maker.name:  # a forked child's maker has another name
        maker.drop(series, tuple(left))
