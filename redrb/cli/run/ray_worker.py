"""The actor of Ray that keeps one worker of a job running, followed by a run or not."""

from __future__ import annotations

import hashlib
import threading
import uuid
from collections import deque
from contextlib import suppress
from dataclasses import asdict, dataclass
from queue import SimpleQueue
from typing import Any

import redrb
from redrb.cli.run.held import return_held
from redrb.cli.run.history import JobEvents
from redrb.cli.run.supervisor import Restarts
from redrb.cli.run.worker_process import Death, WorkerProcess
from redrb.connection import connect
from redrb.environment import PREFIX, child_environment
from redrb.errors import ConfigError, RedrbError
from redrb.options import variable_of

READ_S = 20.0
"""Longest wait for something to report."""

UNREAD_S = 60.0
"""Seconds for which an actor keeps its last reports, after its worker has ended."""

KEPT_BYTES = 8_000_000
"""Bytes of reports that are kept while nobody reads them; the oldest go first."""

METRICS, LOG, DEATH, STARTED, END = "metrics", "log", "death", "started", "end"
"""Kinds of reports: lines of metrics, other output, a death and the delay of the restart (or None),
a start after a death, and the worker's end."""

Report = tuple[str, Any]


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """The worker that an actor keeps running.

    Attributes:
        release: That of redrb where the job was started.
        ends_job: Whether its end is the end of all workers: it is the trainer.
        most_s: Seconds of training after which it is to end; 0: no such end.
        stop_s: Seconds that it has after SIGTERM; then it is killed.
    """

    release: str
    name: str
    command: tuple[str, ...]
    url: str
    namespace: str
    task: str
    restarts: int
    ends_job: bool
    most_s: float
    stop_s: float

    @property
    def digest(self) -> str:
        """Digest of all of this: it may have a password."""
        return hashlib.sha256(repr(asdict(self)).encode()).hexdigest()


@dataclass(frozen=True)
class Page:
    """Reports, in order.

    Attributes:
        begun: Names the actor from its start on Ray to its death.
        first: Number of the first report.
    """

    begun: str
    digest: str
    first: int
    reports: list[Report]


class RayWorker:
    """Keeps one worker running; threads of Ray call the methods.

    A process that dies is started again here, by the rule of `redrb run`. If the actor or its node
    dies, the process goes with it, and Ray starts the actor again, on another node if need be. The
    actor leaves Ray when its worker has ended for good.
    """

    def __init__(self, assignment: Assignment) -> None:
        """Start the worker; raises ConfigError if this node has another release of redrb."""
        if assignment.release != redrb.__version__:
            raise ConfigError(
                f"redrb {redrb.__version__} is on this node, and {assignment.release} where the "
                "job was started: install the same."
            )
        self._assigned, self._begun = assignment, uuid.uuid4().hex
        self._reports: deque[tuple[Report, int]] = deque()
        self._first = self._bytes = 0
        self._reader = ""
        self._changed = threading.Condition()
        self._history = JobEvents()
        self._ending = threading.Event()
        self._process: WorkerProcess | None = None
        self._starting = threading.Lock()
        threading.Thread(target=self._keep, daemon=True).start()

    def read(self, reader: str, begun: str, taken: int) -> Page | None:
        """Return reports from number `taken` on, and forget those before.

        It waits for one, unless the run does not know this actor yet.

        Args:
            reader: Names the run. The one that asked last for its first page is answered.
            begun: That of the page before; "": it has none.

        Returns:
            The reports; None: another run reads now.
        """
        with self._changed:
            if not (begun and self._reader):
                self._reader = reader
                self._changed.notify_all()
            while begun == self._begun and self._reports and self._first < taken:
                self._forget()
            self._changed.wait_for(
                lambda: begun != self._begun or self._reports or self._reader != reader, READ_S
            )
            if self._reader != reader:
                return None
            found = [report for report, _ in self._reports]
            return Page(self._begun, self._assigned.digest, self._first, found)

    def end(self) -> None:
        """End the worker in order: SIGTERM, time, SIGKILL. It is not started again."""
        with self._starting:
            process, again = self._process, self._ending.is_set()
            self._ending.set()
        if process is not None:
            if not again:  # a second SIGTERM would break its end off
                process.terminate()
            if not process.ended.wait(self._assigned.stop_s):
                process.kill()

    def report(self, kind: str, value: object, size: int = 0) -> None:
        """Keep a report until it is read, or too many follow it."""
        with self._changed:
            self._reports.append(((kind, value), size))
            self._bytes += size
            while self._bytes > KEPT_BYTES and len(self._reports) > 1:
                self._forget()
            self._changed.notify_all()

    def _forget(self) -> None:
        self._bytes -= self._reports.popleft()[1]
        self._first += 1

    def _keep(self) -> None:
        rule = Restarts(self._assigned.restarts)
        while True:
            death = self._run_once()
            delay_s = rule.delay_s(death) if death.status and not self._ending.is_set() else None
            if delay_s is None or self._alone():
                break
            self.report(DEATH, (death, delay_s))
            if self._ending.wait(delay_s):
                death = Death(0, 0.0, "")
                break
            self.report(STARTED, None)
        self.report(END, death)
        self._leave()

    def _run_once(self) -> Death:
        assigned, ended = self._assigned, SimpleQueue[Death]()
        command, trained_s = list(assigned.command), self._history.trained_s
        if assigned.most_s and trained_s:  # the last of several flags counts
            command.append(f"--max-seconds={max(assigned.most_s - trained_s, 0.001)}")
        with self._starting:
            if self._ending.is_set():
                return Death(0, 0.0, "")
            variables = {variable_of("url"): assigned.url}
            try:
                self._process = WorkerProcess(
                    command,
                    environment=child_environment(without=PREFIX, **variables),
                    metrics=_Reported(self, METRICS),
                    log=_Reported(self, LOG),
                    on_event=self._history.add,
                    on_end=ended.put,
                )
            except OSError as error:  # this node can start no process now
                return Death(1, 0.0, str(error))
        death = ended.get()
        if death.status:
            with suppress(RedrbError), connect(assigned.url, retry_s=0.0) as client:
                return_held(client, assigned.task, assigned.namespace, death.pid)
        return death

    def _others(self) -> list[str]:
        """Return the names of the job's other actors, also of those that wait for a node."""
        import ray

        return [name for name in ray.util.list_named_actors() if name != self._assigned.name]

    def _alone(self) -> bool:
        """Return whether this is a trainer without makers: it would wait for groups again."""
        import ray

        try:
            return self._assigned.ends_job and not self._others()
        except ray.exceptions.RayError:  # Ray's own server is away for a time
            return False

    def _leave(self) -> None:
        """End the other workers if this was the trainer, and leave Ray when all was read."""
        import ray

        if self._assigned.ends_job:
            calls = {}
            for name in self._others():
                with suppress(ValueError):  # it has ended meanwhile
                    actor = ray.get_actor(name)
                    calls[actor.end.remote()] = actor
            ray.wait(list(calls), num_returns=len(calls), timeout=self._assigned.stop_s)
            for call, actor in calls.items():
                try:
                    ray.get(call, timeout=0)
                except ray.exceptions.RayError:  # it waits for a node, or hangs
                    ray.kill(actor)
        with self._changed:
            self._changed.wait_for(lambda: not self._reports, UNREAD_S)
        ray.kill(ray.get_runtime_context().current_actor)


class _Reported:
    """Reports output of the worker."""

    def __init__(self, worker: RayWorker, kind: str) -> None:
        self._worker, self._kind = worker, kind

    def write(self, lines: bytes) -> None:
        self._worker.report(self._kind, lines, len(lines))

    def close(self) -> None:
        """Leave the reports that are there."""
