"""What works behind a sender: a thread for each stream, and the count of what they hold."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from redrb.connection.stopping import Stop, stoppable
from redrb.errors import (
    ConfigError,
    SendFailed,
    StoreError,
    StoreFull,
    StoreUnavailable,
)
from redrb.stream import ExperienceStream
from redrb.stream.put.writer import Writer
from redrb.stream.sending.copying import Parcel
from redrb.stream.waiting import Wait

_log = logging.getLogger("redrb")

AGAIN_S = 0.5
"""Pause after Redis stayed away longer than the client's own retries last."""

JOIN_S = 2.0
"""How long `close` waits, beyond its timeout, for threads that were asked to stop."""

EXIT_S = 10.0
"""How long the end of the process waits for experience that nobody has flushed."""


@dataclass(frozen=True, slots=True)
class Most:
    """What a sender holds at most; None: no limit."""

    groups: int | None
    nbytes: int | None


@dataclass(frozen=True, slots=True)
class Job:
    """A parcel for one stream, and what its put is told."""

    parcel: Parcel
    given: Mapping[str, Any]


class StreamSender:
    """Puts one job after another into one stream, on a thread of its own.

    Attributes:
        accepted: Jobs that it was given.
        done: Jobs that it has ended, one way or the other.
    """

    def __init__(self, task: str, writer: Writer, lanes: StreamSenders, number: int) -> None:
        self.accepted = self.done = 0
        self.stop = Stop()
        self._task = task
        self._writer = writer
        self._lanes = lanes
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread = threading.Thread(
            target=self._run, name=f"redrb-sender-{number}", daemon=True
        )
        self._thread.start()

    def give(self, job: Job) -> None:
        """Take a job over."""
        self.accepted += 1
        self._jobs.put(job)

    def end(self) -> None:
        """Take no further jobs; may be called from anywhere, also while garbage is collected."""
        self._jobs.put(None)

    def join(self, seconds: float) -> bool:
        """Wait for the thread to end; returns whether it has."""
        self._thread.join(max(0.0, seconds))
        return not self._thread.is_alive()

    def _run(self) -> None:
        with stoppable(self.stop):
            while (job := self._jobs.get()) is not None:
                parcel = job.parcel
                unsent = parcel.groups if self.stop.asked else self._deliver(job)
                self._lanes.settle(self, parcel, unsent)
                del job, parcel  # their memory is free while there is nothing to do

    def _deliver(self, job: Job) -> int:
        """Put a job; returns how many of its groups are not in when this was asked to stop."""
        try:
            for copy in job.parcel.copies:
                copy.synchronize()
            self._writer.begin(job.parcel.items, **job.given)
        except Exception as error:  # noqa: BLE001 (it is told by the next call, and others go on)
            self._lanes.fail(error, job.parcel.groups)
            return 0
        try:
            self._flush()
        except Exception as error:  # noqa: BLE001 (the same)
            left = self._writer.drop()
            if self.stop.asked and isinstance(error, StoreError):
                return left
            self._lanes.fail(error, left)
        return 0

    def _flush(self) -> None:
        """Try until what was begun is in, however long Redis is away."""
        told = False
        while True:
            try:
                self._writer.flush()
                self._lanes.troubled(self, None)
                return
            except StoreFull:  # what `on_full` of the stream asks for
                raise
            except StoreError as error:
                if self.stop.asked:
                    raise
                self._lanes.troubled(self, error)
                if not (told or isinstance(error, StoreUnavailable)):
                    self._lanes.fail(error, 0)
                    told = True
                _log.warning("a sender cannot put into task %r yet: %s", self._task, error)
            self.stop.wait(AGAIN_S)


class StreamSenders:
    """All lanes of a sender, and what they hold; its threads keep it alive until they end.

    Attributes:
        groups: Groups that are not in yet.
        nbytes: Bytes of their tensors.
        put: Groups that are in, or were filtered.
        dropped: Groups that were given up.
        peak_nbytes: Most bytes that were held at once.
    """

    def __init__(self, streams: Sequence[ExperienceStream]) -> None:
        self.groups = self.nbytes = self.put = self.dropped = self.peak_nbytes = 0
        self._changed = threading.Condition()
        self._failures: list[tuple[Exception, int]] = []
        self._troubles: dict[StreamSender, StoreError] = {}
        self._unsent = 0
        self._pid = os.getpid()
        self._over = False
        writers = [(stream.task, stream.writer()) for stream in streams]
        self.lanes = [
            StreamSender(task, writer, self, number)
            for number, (task, writer) in enumerate(writers)
        ]
        _open.add(self)

    @property
    def is_ours(self) -> bool:
        """Whether this process has the threads: a fork of it has none."""
        return self._pid == os.getpid()

    def reserve(self, parcel: Parcel, most: Most, wait: Wait) -> None:
        """Count a parcel in, as soon as there is room: there always is when nothing else is held.

        Raises:
            SendFailed: There was none in time.
            ConfigError: The sender was closed.
        """
        with self._changed:
            while self.groups and not (
                (most.groups is None or self.groups + parcel.groups <= most.groups)
                and (most.nbytes is None or self.nbytes + parcel.nbytes <= most.nbytes)
            ):
                self._check_open()
                if wait.over:
                    what = f"left no room for more within {wait.waited_s:.1f} s"
                    raise self.late(what, self.groups)
                wait.tell(f"a sender is full with {self.groups} groups")
                self._changed.wait(wait.slice_s())
            self._count(parcel.groups, parcel.nbytes)

    def cancel(self, parcel: Parcel) -> None:
        """Count a parcel out that was reserved and is not given to any lane."""
        with self._changed:
            self._count(-parcel.groups, -parcel.nbytes)

    def give(self, jobs: Mapping[StreamSender, Job]) -> None:
        """Give each lane its job; raises ConfigError after `close`."""
        with self._changed:
            self._check_open()
            for lane, job in jobs.items():
                lane.give(job)

    def settle(self, lane: StreamSender, parcel: Parcel, unsent: int) -> None:
        """Count a job out that a lane has ended."""
        with self._changed:
            lane.done += 1
            self._unsent += unsent
            self._count(-parcel.groups, -parcel.nbytes)
            self.put += parcel.groups - unsent

    def fail(self, error: Exception, dropped: int) -> None:
        """Keep an error for the next call."""
        with self._changed:
            self._failures.append((error, dropped))
            self.dropped += dropped
            self.put -= dropped  # settle counts the whole parcel
        _log.error("a sender gives %d groups up: %s", dropped, error)  # should nobody call again

    def troubled(self, lane: StreamSender, error: StoreError | None) -> None:
        """Note why a lane gets nothing in at the moment; None: it does."""
        if error is None:
            self._troubles.pop(lane, None)
        else:
            self._troubles[lane] = error

    def tell(self) -> None:
        """Raise what went wrong since the last call.

        Raises:
            SendFailed: Something did; what was given up is counted.
        """
        with self._changed:
            failures, self._failures = self._failures, []
        if failures:
            first, dropped = failures[0][0], sum(count for _, count in failures)
            more = f", and {len(failures) - 1} errors more" if len(failures) > 1 else ""
            raise SendFailed(
                f"{dropped} groups that were sent before are given up: {first}{more}",
                dropped=dropped,
            ) from first

    def flush(self, wait: Wait) -> None:
        """Wait until all that lanes hold by now is in.

        Raises:
            SendFailed: It is not, in time.
        """
        with self._changed:
            goals = [(lane, lane.accepted) for lane in self.lanes]
            while any(lane.done < goal for lane, goal in goals):
                if wait.over:
                    raise self.late(f"are not in after {wait.waited_s:.1f} s", self.groups)
                wait.tell(f"a sender waits until {self.groups} groups are in")
                self._changed.wait(wait.slice_s())

    def late(self, what: str, unsent: int) -> SendFailed:
        """Return the error that says what is not in, and why as far as that is known."""
        trouble = next(iter(list(self._troubles.values())), None)
        why = "trainers may be behind (`redrb stats`)" if trouble is None else str(trouble)
        failure = SendFailed(f"{unsent} groups {what}: {why}", unsent=unsent)
        failure.__cause__ = trouble
        return failure

    def let_go(self) -> None:
        """End when all that lanes hold is in; never blocks."""
        for lane in self.lanes:
            lane.end()

    def close(self, timeout: float | None) -> None:
        """Put what is held, for `timeout` seconds at most, and end the threads.

        Raises:
            SendFailed: Something is not in, and given up; or was given up before.
        """
        if not self.is_ours:
            return
        with self._changed:
            if self._over:
                return
            self._over = True
        _open.discard(self)
        try:
            self.flush(Wait(timeout))
        except SendFailed:
            pass
        except BaseException:  # Ctrl-C matters more than what it costs
            _log.error("a sender gives up to %d groups up", self.groups)
            raise
        finally:
            self._stop()
        with self._changed:
            unsent = self._unsent + self.groups
        if unsent:
            raise self._given_up(unsent)
        self.tell()

    def _check_open(self) -> None:
        if self._over:
            raise ConfigError("the sender is closed.")

    def _stop(self) -> None:
        for lane in self.lanes:
            lane.stop.ask()
            lane.end()
        end = time.monotonic() + JOIN_S
        ended = [lane.join(end - time.monotonic()) for lane in self.lanes]
        if not all(ended):
            _log.warning("a sender's thread waits for Redis and ends later, by itself")

    def _given_up(self, unsent: int) -> SendFailed:
        failure = self.late("were not in in time, and are given up", unsent)
        failure.dropped = sum(count for _, count in self._failures)
        for error, _ in self._failures:
            failure.add_note(f"given up before: {error}")
        return failure

    def _count(self, groups: int, nbytes: int) -> None:
        self.groups += groups
        self.nbytes += nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.nbytes)
        self._changed.notify_all()


_open: weakref.WeakSet[StreamSenders] = weakref.WeakSet()


@atexit.register
def _at_exit() -> None:
    """Put what makers have left behind, for a while."""
    for lanes in list(_open):
        try:
            lanes.close(EXIT_S)
        except SendFailed as failure:
            _log.error("a sender was not closed, and the process ends: %s", failure)
