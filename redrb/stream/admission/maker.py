"""`Maker`: a process as the holder of rights, with its heartbeat."""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Iterable, Sequence

from redrb.errors import StoreUnavailable
from redrb.forks import in_child
from redrb.processes import has_ended, process_name
from redrb.stream.admission.calls import BeatMaker, GiveBack
from redrb.stream.heartbeat import Heartbeat, Silences, do_each
from redrb.stream.task.task import Task
from redrb.stream.worker import Worker
from redrb.words import counted

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
        self.name = process_name()
        self._requests = itertools.count(1)
        self._held: set[tuple[str, int]] = set()
        self._unused: deque[tuple[str, tuple[int, ...]]] = deque()
        self._given_up: deque[str] = deque()
        self._silences = Silences()
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
            if not self._held:
                self._silences = Silences()
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
        do_each(self._given_up, self._leave)
        do_each(self._unused, lambda unused: self._return(*unused))
        if not self._held:
            return
        incarnation = self._task.description.incarnation
        beat = BeatMaker(self.name, self.lease_ms, incarnation, self._worker.name)
        pulse = self._task.store.call(beat, self._worker.announcement())
        silent_s = self._silences.end()
        name = self._task.name
        if pulse.outcome == "anew":  # a task that was created anew knows none of the rights
            with self._lock:
                self._held.clear()
        elif pulse.outcome == "lost":
            _log.warning(
                "task %r: the heartbeat of rights to begin groups came too late: it was silent for "
                "%.1f s, and lease_ms=%d. Groups that are put with these rights count as late",
                name,
                silent_s,
                self.lease_ms,
            )
        if pulse.taken_back:
            taken = counted(pulse.taken_back, "right")
            _log.warning("task %r: took back %s to begin groups", name, taken)
        self.end_dead(pulse.makers)
        if pulse.more:
            self._nudge()

    def end_dead(self, makers: Iterable[str]) -> int:
        """Take rights back from those of some makers that are known to have died.

        Returns:
            How many makers had died.
        """
        dead = set(filter(has_ended, makers))
        for maker in dead:
            left = self._task.store.pages(GiveBack(holder=maker, died=True))
            if rights := sum(page.found for page in left):
                _log.warning(
                    "task %r: the process of maker %s has died: took back %s",
                    self._task.name,
                    maker,
                    counted(rights, "right"),
                )
        return len(dead)

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
