"""`WriteBehind`: threads that put what a sender was given, one for each stream."""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from queue import SimpleQueue

from redrb import forks
from redrb.connection.deadline import Deadline, here
from redrb.connection.outage import Outage
from redrb.connection.retries import insist
from redrb.connection.stop import Stop
from redrb.errors import ConfigError, SendFailed, StoreError, StoreFull, StoreUnavailable
from redrb.stream import ExperienceStream
from redrb.stream.put.writer import PutInFlight
from redrb.stream.sending.job import SendJob
from redrb.words import counted

_log = logging.getLogger("redrb")

JOIN_S = 2.0
"""How long `close` waits, beyond its timeout, for threads that were asked to stop."""

EXIT_S = 10.0
"""How long a process that ends waits for groups of senders that were not closed."""


class WriteBehind:
    """Puts jobs in the order in which each stream gets them, however long Redis is away.

    A job is open until it is stored or dropped: open jobs are what is counted, bounded and waited
    for. The threads hold this object and not the sender, so that they put what is open when a
    sender is dropped, and end then. Safe among threads.
    """

    def __init__(
        self, streams: Sequence[ExperienceStream], max_groups: int | None, max_bytes: int | None
    ) -> None:
        """Start a thread for each stream."""
        self._max_groups, self._max_bytes = max_groups, max_bytes
        self._changed = threading.Condition()  # its lock guards what follows
        self._open: dict[SendJob, None] = {}
        self._failures: list[tuple[Exception, int]] = []
        self._dealing = self._closed = False
        self._stop = Stop()
        self._owner = forks.process
        self._queues: list[SimpleQueue[SendJob | None]] = [SimpleQueue() for _ in streams]
        self._threads = [
            threading.Thread(
                target=self._run, args=(stream, jobs), name=f"redrb-sender-{number}", daemon=True
            )
            for number, (stream, jobs) in enumerate(zip(streams, self._queues, strict=True))
        ]
        _running.add(self)
        for thread in self._threads:
            thread.start()

    @property
    def groups(self) -> int:
        """Groups that are not stored yet."""
        return sum(job.groups for job in list(self._open))

    @property
    def nbytes(self) -> int:
        """Bytes of their tensors."""
        return sum(job.nbytes for job in list(self._open))

    def check_open(self) -> None:
        """Raise ConfigError after `close`, and in a forked process, which has no threads."""
        if self._owner is not forks.process:
            raise ConfigError(
                "a sender belongs to the process that made it: make one after a fork."
            )
        if self._closed:
            raise ConfigError("the sender is closed.")

    @contextmanager
    def room_for(self, groups: int, nbytes: int) -> Iterator[None]:
        """Wait until no other thread is in this block, and for room; nothing open is room enough.

        Raises:
            SendFailed: There was no room in time.
            ConfigError: The sender was closed.
        """
        deadline = here()
        with self._changed:
            while self._dealing or not self._fits(groups, nbytes):
                self.check_open()
                if deadline.over:
                    raise self._late(f"left no room for more within {deadline.waited_s:.1f} s")
                deadline.log(f"a sender is full with {counted(self.groups, 'group')}")
                self._changed.wait(deadline.slice_s())
            self._dealing = True
        try:
            yield
        finally:
            with self._changed:
                self._dealing = False
                self._changed.notify_all()

    def hand_over(self, jobs: Mapping[int, SendJob]) -> None:
        """Give the threads of these streams a job each; raises ConfigError after `close`."""
        with self._changed:
            self.check_open()
            for number, job in jobs.items():
                self._open[job] = None
                self._queues[number].put(job)

    def raise_failures(self) -> None:
        """Raise the errors since the last call as SendFailed, which counts the groups given up."""
        with self._changed:
            failures, self._failures = self._failures, []
        if failures:
            first, dropped = failures[0][0], sum(count for _, count in failures)
            more = f", and {counted(len(failures) - 1, 'more error')}" if len(failures) > 1 else ""
            raise SendFailed(
                f"given up, of those sent before: {counted(dropped, 'group')}: {first}{more}",
                dropped=dropped,
            ) from first

    def flush(self) -> None:
        """Wait until no job that is open now is open; raises SendFailed after the time."""
        deadline = here()
        with self._changed:
            jobs = list(self._open)
            while not self._open.keys().isdisjoint(jobs):
                if deadline.over:
                    raise self._late(f"not stored after {deadline.waited_s:.1f} s")
                deadline.log(f"a sender waits until {counted(self.groups, 'group', 'are')} stored")
                self._changed.wait(deadline.slice_s())

    def end(self) -> None:
        """Let the threads end after their last jobs; never blocks."""
        for jobs in self._queues:
            jobs.put(None)

    def close(self, timeout: float | None) -> None:
        """Put what is open, for `timeout` seconds at most, end the threads; raises SendFailed."""
        if self._owner is not forks.process:
            return
        with self._changed:
            if self._closed:
                return
            self._closed = True
        _running.discard(self)
        try:
            with Deadline(timeout), suppress(SendFailed):  # the groups are counted below
                self.flush()
        except BaseException:  # such as KeyboardInterrupt
            dropped = counted(self.groups, "group")
            _log.error("a sender was interrupted: it drops at most %s", dropped)
            raise
        finally:
            self._end_threads()
        with self._changed:
            if self._open:
                failure = self._late("not stored in time, and given up")
                failure.dropped = sum(count for _, count in self._failures)
                for error, _ in self._failures:
                    failure.add_note(f"given up before: {error}")
                self._open.clear()
                raise failure
        self.raise_failures()

    def fail(self, error: Exception, dropped: int) -> None:
        """Keep an error, because of which groups were dropped, for the next call."""
        with self._changed:
            self._failures.append((error, dropped))
        what = f"drops {counted(dropped, 'group')}" if dropped else "cannot put"
        _log.error("a sender %s: %s", what, error)  # in case no call follows

    def _fits(self, groups: int, nbytes: int) -> bool:
        return not self._open or (
            (self._max_groups is None or self.groups + groups <= self._max_groups)
            and (self._max_bytes is None or self.nbytes + nbytes <= self._max_bytes)
        )

    def _late(self, problem: str) -> SendFailed:
        """Return the error for the groups of open jobs, with the reason if it is known."""
        unsent = self.groups
        trouble = next((job.trouble for job in self._open if job.trouble is not None), None)
        behind = (
            "trainers may be behind, or Redis may be at its memory limit (`redrb doctor "
            "--namespace NAMESPACE` says which)"
        )
        failure = SendFailed(
            f"{counted(unsent, 'group')} {problem}: {trouble or behind}", unsent=unsent
        )
        failure.__cause__ = trouble
        return failure

    def _end_threads(self) -> None:
        self._stop.ask()
        self.end()
        # counts as time on Redis for a process that was asked to end
        with Deadline(at_most=JOIN_S) as deadline:
            for thread in self._threads:
                thread.join(deadline.left_s)
        if any(thread.is_alive() for thread in self._threads):
            _log.warning("a sender's thread still waits for Redis: it ends when Redis answers")

    # in the threads

    def _run(self, stream: ExperienceStream, jobs: SimpleQueue[SendJob | None]) -> None:
        outage = Outage(f"a sender cannot put into task {stream.task!r} yet")
        in_flight = stream.writer().in_flight
        with Deadline(stop=self._stop):
            while (job := jobs.get()) is not None:
                if self._stop:
                    job.return_rights()
                elif self._put(job, in_flight, outage):
                    with self._changed:
                        self._open.pop(job, None)
                        self._changed.notify_all()
                del job  # frees its memory while the thread waits

    def _put(self, job: SendJob, in_flight: PutInFlight, outage: Outage) -> bool:
        """Put a job; returns whether it is over: False if the thread was stopped."""
        try:
            for copy in job.copies:
                copy.synchronize()
            batch = in_flight.prepare(job.as_groups(), job.options)
        except Exception as error:  # noqa: BLE001 (the next call raises it, and other jobs go on)
            job.return_rights()
            self.fail(error, job.groups)
            return True
        refusal = batch.refusal()
        if refusal is not None:  # the other groups of the job are put
            self.fail(refusal, len(batch.refused))
        if not batch:
            batch.rights.end(0, counted=False)
            return True
        try:
            in_flight.send(batch)
            self._finish(job, in_flight, outage)
        except Exception as error:  # noqa: BLE001 (the same)
            left = in_flight.drop() or len(batch.groups)
            if self._stop and isinstance(error, StoreError):
                job.groups = left
                return False
            self.fail(error, left)
        return True

    def _finish(self, job: SendJob, in_flight: PutInFlight, outage: Outage) -> None:
        """Repeat the put in flight until it is stored, however long Redis is away."""

        def finish() -> None:
            with Deadline():
                in_flight.finish()

        def note(error: StoreError) -> None:
            before, job.trouble = job.trouble, error
            is_new = before is None or isinstance(before, StoreUnavailable)
            if is_new and not isinstance(error, StoreUnavailable):
                self.fail(error, 0)
            outage.failed(error)

        # StoreFull: the stream was opened with on_full="error"
        insist(finish, self._stop, note, errors=StoreError, unless=StoreFull, once_more=True)
        outage.over()


_running: weakref.WeakSet[WriteBehind] = weakref.WeakSet()


@atexit.register
def _at_exit() -> None:
    """Put the groups of senders that were not closed, for a while."""
    for sender in list(_running):
        try:
            sender.close(EXIT_S)
        except SendFailed as failure:
            _log.error("a sender was not closed, and the process ends: %s", failure)
