"""The threads of an `ExperienceSender`, one for each stream, from their start to their end."""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

from redrb.connection.deadline import Deadline, here
from redrb.connection.outage import Outage
from redrb.connection.retries import insist
from redrb.connection.stop import Stop
from redrb.errors import SendFailed, StoreError, StoreFull, StoreUnavailable
from redrb.forks import mark
from redrb.stream import ExperienceStream
from redrb.stream.put.options import PutOptions
from redrb.stream.put.preparer import groups_of
from redrb.stream.put.rights import Rights
from redrb.stream.sending.backlog import Backlog, HeldItems
from redrb.words import counted


@dataclass(frozen=True, slots=True)
class SendJob:
    """Items for one stream, and the options of its put."""

    held: HeldItems
    options: PutOptions

    def return_rights(self) -> None:
        """Return its rights of admission, as it is given up."""
        if isinstance(self.options.admission, Rights):
            self.options.admission.end(0, counted=False)


class StreamSender:
    """Puts one job after another into one stream, however long Redis is away.

    Attributes:
        accepted: Jobs that were handed over.
        done: Jobs that have ended, in success or failure.
        stop: Ends the waits of the thread.
    """

    def __init__(
        self, stream: ExperienceStream, backlog: Backlog, number: int, owner: object
    ) -> None:
        """Start the thread; `owner` stays alive until the thread ends."""
        self.accepted = self.done = 0
        self.stop = Stop()
        self._outage = Outage(f"a sender cannot put into task {stream.task!r} yet")
        self._in_flight = stream.writer().in_flight
        self._backlog = backlog
        self._owner = owner
        self._jobs: SimpleQueue[SendJob | None] = SimpleQueue()
        self._thread = threading.Thread(
            target=self._run, name=f"redrb-sender-{number}", daemon=True
        )
        self._thread.start()

    def hand_over(self, job: SendJob) -> None:
        """Queue a job for the thread."""
        self.accepted += 1
        self._jobs.put(job)

    def end(self) -> None:
        """Let the thread end after its last job; callable also from a finalizer."""
        self._jobs.put(None)

    def join(self, seconds: float) -> bool:
        """Wait for the thread to end; returns whether it has."""
        self._thread.join(max(0.0, seconds))
        return not self._thread.is_alive()

    def _run(self) -> None:
        with Deadline(stop=self.stop):
            while (job := self._jobs.get()) is not None:
                held = job.held
                unsent = self._give_up(job) if self.stop else self._put(job)
                with self._backlog.changed:
                    self.done += 1
                    self._backlog.settle(held, unsent)
                del job, held  # frees their memory while the thread waits

    def _give_up(self, job: SendJob) -> int:
        """Give a job up; returns how many groups it has."""
        job.return_rights()
        return job.held.groups

    def _put(self, job: SendJob) -> int:
        """Put a job; returns how many of its groups are not stored when the thread was stopped."""
        try:
            for copy in job.held.copies:
                copy.synchronize()
            batch = self._in_flight.prepare(groups_of(job.held.items), job.options)
        except Exception as error:  # noqa: BLE001 (the next call raises it, and other jobs go on)
            job.return_rights()
            self._backlog.fail(error, job.held.groups)
            return 0
        try:
            refusal = batch.refusal()
            if refusal is not None:  # the other groups of the job are put
                self._backlog.fail(refusal, len(batch.refused))
            if not batch:
                batch.rights.end(0, counted=False)
                return 0
            self._in_flight.send(batch)
        except Exception as error:  # noqa: BLE001 (the same)
            self._backlog.fail(error, job.held.groups)
            return 0
        try:
            self._finish()
        except Exception as error:  # noqa: BLE001 (the same)
            left = self._in_flight.drop()
            if self.stop and isinstance(error, StoreError):
                return left
            self._backlog.fail(error, left)
        return 0

    def _finish(self) -> None:
        """Repeat the put in flight until it is stored, however long Redis is away."""
        reported = False

        def finish() -> None:
            with Deadline():
                self._in_flight.finish()

        def note(error: StoreError) -> None:
            nonlocal reported
            self._backlog.note_outage(self, error)
            if not (reported or isinstance(error, StoreUnavailable)):
                self._backlog.fail(error, 0)
                reported = True
            self._outage.failed(error)

        # StoreFull: the stream was opened with on_full="error"
        insist(finish, self.stop, note, errors=StoreError, unless=StoreFull, once_more=True)
        self._backlog.note_outage(self, None)
        self._outage.over()


_log = logging.getLogger("redrb")
JOIN_S = 2.0
"""How long `close` waits, beyond its timeout, for threads that were asked to stop."""

EXIT_S = 10.0
"""How long a process that ends waits for groups of senders that were not closed."""


class StreamSenders:
    """The threads of one sender.

    They outlive a sender that was not closed, and put what they hold before they end.

    Attributes:
        each: One for each stream.
        backlog: The groups that they hold.
    """

    def __init__(self, streams: Sequence[ExperienceStream], backlog: Backlog) -> None:
        self.backlog = backlog
        self.each = [
            StreamSender(stream, self.backlog, number, owner=self)
            for number, stream in enumerate(streams)
        ]
        self._owner = mark()
        _open.add(self)

    @property
    def are_here(self) -> bool:
        """Whether the threads run in this process: a forked process has none of them."""
        return self._owner is mark()

    def hand_over(self, jobs: Mapping[StreamSender, SendJob]) -> None:
        """Give each thread its job; raises ConfigError after `close`."""
        with self.backlog.changed:
            self.backlog.check_open()
            for sender, job in jobs.items():
                sender.hand_over(job)

    def flush(self) -> None:
        """Wait until all jobs handed over by now have ended; raises SendFailed after the time."""
        backlog, deadline = self.backlog, here()
        with backlog.changed:
            goals = [(sender, sender.accepted) for sender in self.each]
            while any(sender.done < goal for sender, goal in goals):
                if deadline.over:
                    problem = f"not stored after {deadline.waited_s:.1f} s"
                    raise backlog.late(backlog.groups, problem)
                deadline.log(
                    f"a sender waits until {counted(backlog.groups, 'group', 'are')} stored"
                )
                backlog.changed.wait(deadline.slice_s())

    def end(self) -> None:
        """Let the threads end after their last jobs; never blocks."""
        for sender in self.each:
            sender.end()

    def close(self, timeout: float | None) -> None:
        """Put what is held, for `timeout` seconds at most, end the threads; raises SendFailed."""
        if not self.are_here:
            return
        backlog = self.backlog
        with backlog.changed:
            if backlog.closed:
                return
            backlog.closed = True
        _open.discard(self)
        try:
            with Deadline(timeout):
                self.flush()
        except SendFailed:
            pass  # the groups are counted below
        except BaseException:  # such as KeyboardInterrupt
            dropped = counted(backlog.groups, "group")
            _log.error("a sender was interrupted: it drops at most %s", dropped)
            raise
        finally:
            self._stop()
        with backlog.changed:
            unsent = backlog.unsent + backlog.groups
        if unsent:
            raise backlog.given_up(unsent)
        backlog.raise_failures()

    def _stop(self) -> None:
        for sender in self.each:
            sender.stop.ask()
            sender.end()
        # counts as time on Redis for a process that was asked to end
        with Deadline(at_most=JOIN_S) as deadline:
            ended = [sender.join(deadline.left_s) for sender in self.each]
        if not all(ended):
            _log.warning("a sender's thread still waits for Redis: it ends when Redis answers")


_open: weakref.WeakSet[StreamSenders] = weakref.WeakSet()


@atexit.register
def _at_exit() -> None:
    """Put the groups of senders that were not closed, for a while."""
    for senders in list(_open):
        try:
            senders.close(EXIT_S)
        except SendFailed as failure:
            _log.error("a sender was not closed, and the process ends: %s", failure)
