"""`Maker`: a process as the holder of rights, with its heartbeat."""

from __future__ import annotations

import itertools
import logging
import os
import socket
import threading
import uuid
from collections import deque
from collections.abc import Sequence

from redrb.errors import StoreError, StoreUnavailable
from redrb.forks import in_child
from redrb.stream.admission.calls import BeatMaker, GiveBack
from redrb.stream.heartbeat import Heartbeat
from redrb.stream.task.task import Task
from redrb.stream.worker import Worker

_log = logging.getLogger("redrb")


class Maker:
    """Holds the rights of one stream object; safe among threads.

    Its heartbeat sends requests only while it holds rights.
    """

    def __init__(self, task: Task, lease_ms: int, worker: Worker) -> None:
        """Make a maker; its heartbeat begins with the first right."""
        self._task = task
        self._worker = worker
        self.lease_ms = lease_ms
        self._begin()
        in_child(self._begin)

    def _begin(self) -> None:
        """Become a maker that Redis does not know yet: at first, and in a forked process."""
        self.name = f"{socket.gethostname()[:64]}-{os.getpid()}-{uuid.uuid4().hex[:12]}"
        self._requests = itertools.count(1)
        self._held: set[tuple[str, int]] = set()
        self._unused: deque[tuple[str, tuple[int, ...]]] = deque()
        self._given_up: deque[str] = deque()
        self._lock = threading.Lock()
        self._heartbeat: Heartbeat | None = None

    @property
    def held(self) -> int:
        """Rights that it holds."""
        return len(self._held)

    def request(self) -> str:
        """Return the name of a new request."""
        return f"{self.name}/{next(self._requests)}"

    def hold(self, series: str, numbers: Sequence[int]) -> None:
        """Keep rights alive until `end`."""
        with self._lock:
            self._held.update((series, number) for number in numbers)
        self._attend()

    def end(self, series: str, numbers: Sequence[int]) -> None:
        """Note that Redis has counted rights as used or returned."""
        with self._lock:
            self._held.difference_update((series, number) for number in numbers)

    def give_back(self, series: str, numbers: Sequence[int]) -> None:
        """Return rights now, or by the heartbeat if Redis stays away."""
        try:
            self._return(series, numbers)
        except StoreUnavailable as error:
            _log.warning("rights to begin groups are returned later: %s", error)
            self.drop(series, numbers)

    def drop(self, series: str, numbers: Sequence[int]) -> None:
        """Leave rights to the heartbeat thread, which returns them; never blocks."""
        self._unused.append((series, tuple(numbers)))
        self._nudge()

    def give_up(self, waiter: str) -> None:
        """Let the heartbeat thread return what a lost request was given; never blocks."""
        self._attend()
        self._given_up.append(waiter)
        self._nudge()

    def beat(self) -> None:
        """Return rights that were dropped, and renew the deadline while any right is held."""
        while self._given_up:
            waiter = self._given_up.popleft()
            try:
                self._leave(waiter)
            except StoreError:
                self._given_up.appendleft(waiter)
                raise
        while self._unused:
            series, numbers = self._unused.popleft()
            try:
                self._return(series, numbers)
            except StoreError:
                self._unused.appendleft((series, numbers))
                raise
        if not self._held:
            return
        incarnation = self._task.description.incarnation
        beat = BeatMaker(self.name, self.lease_ms, incarnation, self._worker.name)
        pulse = self._task.store.call(beat, self._worker.announcement())
        name = self._task.name
        if pulse.outcome == "anew":  # a task that was created anew knows none of the rights
            with self._lock:
                self._held.clear()
        elif pulse.outcome == "lost":
            _log.warning("task %r: the heartbeat of rights to begin groups came too late", name)
        if pulse.taken_back:
            _log.warning("task %r: took back %d rights to begin groups", name, pulse.taken_back)
        if pulse.more:
            self._nudge()

    def close(self) -> None:
        """Stop the heartbeat and return all rights that are held."""
        with self._lock:
            heartbeat, self._heartbeat = self._heartbeat, None
        if heartbeat is not None:
            heartbeat.stop()
            try:
                self._leave(self.name)
            except StoreUnavailable as error:
                _log.warning(
                    "rights to begin groups return when their heartbeat is missed: %s", error
                )
            self._held.clear()

    def _return(self, series: str, numbers: Sequence[int]) -> None:
        given = GiveBack(series=series, numbers=tuple(map(str, numbers)))
        self._task.store.call(given)
        self.end(series, numbers)

    def _leave(self, holder: str) -> None:
        list(self._task.store.pages(GiveBack(holder=holder)))

    def _attend(self) -> None:
        with self._lock:
            if self._heartbeat is None:
                self._heartbeat = Heartbeat(self.beat, self.lease_ms, "admission")

    def _nudge(self) -> None:
        heartbeat = self._heartbeat
        if heartbeat is not None:
            heartbeat.nudge()
