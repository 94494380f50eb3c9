"""Keeps the processes of a run alive: restarts those that die, and ends all of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from queue import Empty, SimpleQueue
from typing import Protocol

from redrb.cli.processes.lifetime import WRONG_CONFIGURATION
from redrb.cli.run.server import RunServer
from redrb.cli.run.worker_process import Death
from redrb.errors import RedrbError

SERVER = "the server"

KILLED_S = 10.0
"""Longest wait for the end of a process that was killed."""

FIRST_DELAY_S = 1.0
"""Delay before the first restart; each further one is twice as long."""

LONGEST_DELAY_S = 60.0
"""Longest delay before a restart."""

WELL_S = 60.0
"""A process that ran for so long ran well: its earlier deaths are forgotten."""


@dataclass
class Restarts:
    """The rule by which a process that dies is started again."""

    most: int
    deaths: int = 0

    def delay_s(self, death: Death) -> float | None:
        """Count a death; return the delay before the restart, or None: it is given up."""
        if death.status == WRONG_CONFIGURATION:
            return None
        self.deaths = 1 if death.ran_s >= WELL_S else self.deaths + 1
        if self.deaths > self.most:
            return None
        return min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(self.deaths - 1, 10))


@dataclass(frozen=True)
class Restarting:
    """A worker has died, and the place that it runs in starts it again.

    Attributes:
        delay_s: The delay before its restart; None: it was lost with its place, which is no death
            that counts, and starts in another one when there is room.
    """

    death: Death
    delay_s: float | None


@dataclass(frozen=True)
class Restarted:
    """The place that a worker runs in has started it again."""


Change = Death | Restarting | Restarted
"""What becomes of a worker. A death is its end in the place that it runs in."""

OnChange = Callable[[Change], None]


class Worker(Protocol):
    """A worker that was started, in whatever place."""

    def terminate(self) -> None:
        """Send SIGTERM, unless it has ended."""

    def kill(self) -> None:
        """Send SIGKILL, unless it has ended."""


class ProcessState(Enum):
    """The state of a supervised process."""

    RUNNING = "running"
    WAITING = "waiting for its restart"
    DONE = "done"
    GIVEN_UP = "given up"


@dataclass
class _Process:
    """The server or a worker."""

    name: str
    start: Callable[[OnChange], Worker | None]
    restarts: Restarts
    state: ProcessState = ProcessState.WAITING
    due: float = 0.0
    worker: Worker | None = None


@dataclass
class Supervisor:
    """The processes of a run: a server, the trainer, and makers; one thread calls its methods.

    Attributes:
        trainer: Name of the worker whose end is the end of the run.
        report: Is called with "death", "restarted" or "given_up", and what belongs to it by name.
        happenings: Names of processes, and what becomes of them; None only ends the wait of `step`.
        left: Why the workers go on without the run; "": they do not.
    """

    trainer: str
    report: Callable[..., None]
    happenings: SimpleQueue[tuple[str, Change] | None] = field(default_factory=SimpleQueue)
    left: str = ""
    _parts: dict[str, _Process] = field(default_factory=dict)
    _ending: bool = False

    def add_server(self, server: RunServer, restarts: int) -> None:
        """Add and start the server; raises ConfigError or StoreUnavailable if it fails."""
        most = restarts if server.restarts else 0
        part = self._parts[SERVER] = _Process(SERVER, server.start, Restarts(most))
        self._start(part)

    def add_worker(self, name: str, start: Callable[[OnChange], Worker], restarts: int) -> None:
        """Add a worker, which the next `step` starts.

        `restarts` is 0 if the place that it runs in starts it again.
        """
        self._parts[name] = _Process(name, start, Restarts(restarts))

    def leave(self, why: str) -> None:
        """Let the workers go on without the run; may be called in any thread."""
        self.left = self.left or why
        self.happenings.put(None)

    @property
    def states(self) -> Mapping[str, ProcessState]:
        """The state of each process by its name."""
        return {name: part.state for name, part in self._parts.items()}

    @property
    def over(self) -> str:
        """Why the run cannot go on; "": it goes on."""
        states = self.states
        if self.left:
            return self.left
        if states[self.trainer] is ProcessState.DONE:
            return "the trainer has ended"
        for name in (self.trainer, SERVER):
            if states[name] is ProcessState.GIVEN_UP:
                return f"{name} was given up"
        if all(state is ProcessState.GIVEN_UP for state in self._maker_states):
            return "all makers were given up"
        return ""

    def step(self, timeout: float) -> None:
        """Start processes that are due, then wait for the next happening, at most `timeout`."""
        now = time.monotonic()
        due = [part for part in self._parts.values() if part.state is ProcessState.WAITING]
        for part in due:
            if part.due <= now:
                self._start_again(part)
        waits = [part.due - now for part in due if part.state is ProcessState.WAITING]
        try:
            happening = self.happenings.get(timeout=max(0.0, min([timeout, *waits])))
        except Empty:
            return
        self._take(happening)

    def end_workers(self, seconds: float, *, makers_s: float) -> None:
        """Send SIGTERM to all workers, and wait until they have ended; then kill them.

        The trainer comes first, so that it does not wait for makers that end. A server that has
        died is started at once, without its delay, because workers put and acknowledge at the end.
        """
        self._ending = True
        while not self.happenings.empty():
            self._take(self.happenings.get())
        self._start_server_now()
        began = time.monotonic()
        for part in self._running_workers:
            if part.worker is not None:
                part.worker.terminate()
        while running := self._running_workers:
            now = time.monotonic() - began
            left = {
                part.name: (seconds if part.name == self.trainer else makers_s) - now
                for part in running
            }
            for part in running:
                if left[part.name] <= 0 and part.worker is not None:
                    part.worker.kill()
            longest = [each for each in left.values() if each > 0]
            try:
                self._take(self.happenings.get(timeout=min(longest, default=KILLED_S)))
            except Empty:
                if not longest:
                    return  # the kernel does not end it
            self._start_server_now()

    def kill(self) -> None:
        """Send SIGKILL to all workers."""
        for part in self._parts.values():
            if part.worker is not None:
                part.worker.kill()

    @property
    def _maker_states(self) -> list[ProcessState]:
        workers = self._parts.keys() - {SERVER, self.trainer}
        return [self._parts[name].state for name in workers]

    @property
    def _running_workers(self) -> list[_Process]:
        return [part for part in self._parts.values() if part.worker is not None]

    def _start_server_now(self) -> None:
        server = self._parts.get(SERVER)
        if server is not None and server.state is ProcessState.WAITING:
            self._start_again(server)

    def _start_again(self, part: _Process) -> None:
        try:
            self._start(part)
        except RedrbError as error:  # of the server
            self._died(part, Death(1, 0.0, str(error)))
        else:
            if part.restarts.deaths:
                self.report("restarted", worker=part.name)

    def _start(self, part: _Process) -> None:
        part.state = ProcessState.RUNNING
        part.worker = part.start(lambda change: self.happenings.put((part.name, change)))

    def _take(self, happening: tuple[str, Change] | None) -> None:
        if happening is None:
            return
        name, change = happening
        part = self._parts[name]
        if isinstance(change, Restarted):
            part.state = ProcessState.RUNNING
            self.report("restarted", worker=name)
        elif isinstance(change, Restarting):
            if change.delay_s is not None:
                part.restarts.delay_s(change.death)  # counts it
            self._restarts(part, change.death, change.delay_s, due=math.inf)
        else:
            part.worker = None
            if change.status == 0 and name != SERVER:
                part.state = ProcessState.DONE
            else:
                self._died(part, change)

    def _died(self, part: _Process, death: Death) -> None:
        # without makers the trainer would wait for groups again
        alone = part.name == self.trainer and not any(
            state in (ProcessState.RUNNING, ProcessState.WAITING) for state in self._maker_states
        )
        too_late = self._ending and part.name != SERVER
        delay = None if alone or too_late else part.restarts.delay_s(death)
        if delay is None:
            part.state = ProcessState.GIVEN_UP
            told = {"worker": part.name, "status": death.status, "why": death.why}
            self.report("given_up", **told, reason=death.detail, deaths=part.restarts.deaths)
        else:
            self._restarts(part, death, delay, due=time.monotonic() + delay)

    def _restarts(self, part: _Process, death: Death, delay_s: float | None, *, due: float) -> None:
        part.state, part.due = ProcessState.WAITING, due
        told = {"worker": part.name, "status": death.status, "why": death.why}
        self.report("death", **told, reason=death.detail, brief=death.brief, restart_in_s=delay_s)
