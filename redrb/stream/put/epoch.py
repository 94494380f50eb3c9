"""`Epoch`: the epoch of a task's records of producers, as this process last learned it."""

from __future__ import annotations

import time

from redrb.stream.put.scripts import PutScripts
from redrb.stream.task.task import Task

FRESH_S = 1200.0
"""Age at which the epoch is read again: a third of the shortest epoch (`include/producers.lua`).

A put that names an older epoch is refused and sent again, so this is about round trips only.
"""


class Epoch:
    """The epoch that new puts name; safe among threads."""

    def __init__(self, task: Task, scripts: PutScripts) -> None:
        self._task = task
        self._scripts = scripts
        description = task.description
        self._learned = (description.incarnation, description.epoch, time.monotonic())

    @property
    def is_fresh(self) -> bool:
        """Whether it is known without a request."""
        incarnation, _, learned = self._learned
        fresh = time.monotonic() - learned < FRESH_S
        return fresh and incarnation == self._task.description.incarnation

    def current(self, retry_s: float | None) -> tuple[str, int]:
        """Return the task's incarnation and the epoch in it; reads it again when it is old.

        Raises:
            StoreUnavailable: Redis stayed away.
        """
        if not self.is_fresh:
            self.learn(self._scripts.epoch(retry_s=retry_s))
        incarnation, epoch, _ = self._learned
        return incarnation, epoch

    def learn(self, epoch: int) -> None:
        """Note the epoch that the task has named."""
        self._learned = (self._task.description.incarnation, epoch, time.monotonic())
