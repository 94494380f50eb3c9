"""The thread that puts the items of a sender into one stream."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from queue import SimpleQueue

from redrb.connection.deadline import Deadline
from redrb.connection.outage import Outage
from redrb.connection.stop import Stop
from redrb.errors import StoreError, StoreFull, StoreUnavailable
from redrb.stream import ExperienceStream
from redrb.stream.put.batch import PutBatch
from redrb.stream.put.items import groups_of
from redrb.stream.put.options import PutOptions
from redrb.stream.put.rights import Rights
from redrb.stream.sending.backlog import Backlog
from redrb.stream.sending.held_items import HeldItems

OUTAGE_PAUSE_S = 0.5
"""Pause between puts while Redis is away for longer than the client's retries last."""


@dataclass(frozen=True, slots=True)
class Job:
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
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread = threading.Thread(
            target=self._run, name=f"redrb-sender-{number}", daemon=True
        )
        self._thread.start()

    def hand_over(self, job: Job) -> None:
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

    def _give_up(self, job: Job) -> int:
        """Give a job up; returns how many groups it has."""
        job.return_rights()
        return job.held.groups

    def _put(self, job: Job) -> int:
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
            self._report_refused(batch)
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

    def _report_refused(self, batch: PutBatch) -> None:
        """Keep the error of groups that cannot be stored; the others of the job are put."""
        error = batch.refusal()
        if error is not None:
            self._backlog.fail(error, len(batch.refused))

    def _finish(self) -> None:
        """Repeat the put in flight until it is stored, however long Redis is away."""
        reported = False
        while True:
            try:
                with Deadline():
                    self._in_flight.finish()
                self._backlog.note_outage(self, None)
                self._outage.over()
                return
            except StoreFull:  # the stream was opened with on_full="error"
                raise
            except StoreError as error:
                if self.stop:
                    raise
                self._backlog.note_outage(self, error)
                if not (reported or isinstance(error, StoreUnavailable)):
                    self._backlog.fail(error, 0)
                    reported = True
                self._outage.failed(error)
            self.stop.wait(OUTAGE_PAUSE_S)
