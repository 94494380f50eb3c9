"""`Admitter`: one request for rights of a task, and its wait in the queue that Redis keeps."""

from __future__ import annotations

import logging
import time
import uuid

from redrb.connection.deadline import here
from redrb.errors import AdmissionRefused, AdmissionTimeout, ConfigError
from redrb.stream.admission.admission import Admission
from redrb.stream.admission.calls import Admit, AdmitReply
from redrb.stream.admission.maker import Maker
from redrb.stream.task.task import Task
from redrb.stream.worker import Worker
from redrb.words import counted

HOLD_S = 3600.0
"""Default of `hold_s`."""

MOST_RIGHTS = 4096
"""Most rights of one request."""

SLICE_S = 5.0
"""Longest block before a maker looks again: rare, as thousands of makers may wait."""

STOP_S = 1.0
"""Longest block of a thread that may be asked to stop."""

QUEUE_TTL_MS = 30_000
"""Time for which a maker that stopped looking keeps its place in the queue."""

_log = logging.getLogger("redrb")


class Admitter:
    """Asks for the rights of one stream object, which `maker` holds; safe among threads."""

    def __init__(self, task: Task, lease_ms: int, worker: Worker) -> None:
        self._task = task
        self._worker = worker
        self.maker = Maker(task, lease_ms, worker)
        self._slice_s = min(SLICE_S, lease_ms / 3000)

    def admit(self, count: int, least: int, hold_s: float) -> Admission:
        """Wait for rights, as `ExperienceStream.admit` does, and raise its errors."""
        self._worker.puts()
        waiter = self.maker.request()
        try:
            with self._worker.waiting("right"):
                reply = self._granted(waiter, count, least, round(hold_s * 1000))
            prefix, numbers = self._task.store.keys.prefix, sorted(reply.numbers)
            admission = Admission(
                self.maker, self._task.name, prefix, reply.series, numbers, reply.version
            )
            self.maker.hold(reply.series, numbers)
        except (AdmissionTimeout, ConfigError):  # it was given none, and is not queued
            raise
        except BaseException:
            self.maker.give_up(waiter)
            raise
        if reply.released:
            _log.warning(
                "task %r: %s begun beyond the bound of staleness, because nothing went "
                "on: takes need more groups for a version than groups_per_version says, or the "
                "trainer does not publish",
                self._task.name,
                counted(reply.released, "group", "are"),
            )
        return admission

    def _granted(self, waiter: str, count: int, least: int, hold_ms: int) -> AdmitReply:
        """Ask until rights are given."""
        while True:
            last = here().over
            ttl_ms = 0 if last else max(QUEUE_TTL_MS, 3 * round(self._slice_s * 1000))
            admit = Admit(
                waiter,
                count,
                least,
                ttl_ms,
                self.maker.lease_ms,
                hold_ms,
                self._task.description.incarnation,
                uuid.uuid4().hex,
            )
            reply = self._task.store.call(admit)
            if reply.outcome == "granted":
                return reply
            if reply.outcome == "gone":
                self._task.reopen(refused_here=True)
                continue
            self._refuse(reply, least)
            if reply.more or self.maker.end_dead(reply.makers):
                continue
            if last:
                raise self._timeout(reply, least)
            self._log(reply, least)
            self._block(waiter)

    def _block(self, waiter: str) -> None:
        """Block until the waiter is woken, or is to look again."""
        deadline = here()
        end = time.monotonic() + deadline.slice_s(self._slice_s)
        longest_s = STOP_S if deadline.stop is not None else self._slice_s
        while not deadline.over and (left := end - time.monotonic()) > 0:
            if self._task.store.wait_for_wake(waiter, longest_s=min(left, longest_s)):
                return

    def _log(self, reply: AdmitReply, least: int) -> None:
        if reply.outcome == "unset":
            missing = "no process has given groups_per_version: start the trainer, or open the "
            missing += "stream with groups_per_version=, the groups that it trains for each version"
        else:
            held, stored = (
                counted(reply.held, "right", "are"),
                counted(reply.stored, "group", "are"),
            )
            first = ", which a trainer has to train first" if reply.stored else ""
            missing = f"{held} held and {stored} stored{first}"
        text = f"task {self._task.name!r}: a maker waits for the right to begin "
        text += f"{counted(least, 'group')}; {missing}"
        here().log(text, self._task.store.keys.namespace)

    def _refuse(self, reply: AdmitReply, least: int) -> None:
        """Raise the error of a request that no waiting can help."""
        task = self._task.name
        if reply.outcome == "refused":
            raise AdmissionRefused(
                f"task {task!r} gives no rights to begin groups: it has no bound of staleness, or "
                "max_reads, with which groups cannot be counted. Open the stream with "
                "max_staleness= and groups_per_version=, or put without admission."
            )
        if reply.outcome == "never":
            most, never = counted(reply.most, "group"), counted(least, "right", "are")
            raise ConfigError(
                f"task {task!r}: at most {most} may be begun and not yet trained, so {never} never "
                "given: ask for fewer, give least=, or raise max_staleness or groups_per_version."
            )

    def _timeout(self, reply: AdmitReply, least: int) -> AdmissionTimeout:
        return AdmissionTimeout(
            task=self._task.name,
            wanted=least,
            waited_s=here().waited_s,
            held=reply.held,
            stored=reply.stored,
            trained=reply.trained,
            most=reply.most,
            version=reply.version,
            waiting=reply.waiting,
            oldest_s=reply.oldest_ms / 1000,
            oldest_maker=reply.oldest_maker,
        )
