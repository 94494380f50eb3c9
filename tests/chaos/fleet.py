"""The worker processes of a run: started by a fork, killed, paused, replaced and ended."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess

import psutil

from tests.chaos.options import Place
from tests.chaos.programs import HEIR, ROLES, run


@dataclass
class Running:
    """The process that has a role now."""

    name: str
    process: BaseProcess
    paused_at: float | None = None

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid


@dataclass(frozen=True)
class Pause:
    """A time for which a worker was stopped."""

    name: str
    began: float
    ended: float


@dataclass
class Fleet:
    """All workers of a run.

    Attributes:
        killed: Names of workers that were killed.
        pauses: Times for which workers were stopped.
        findings: Workers that ended by themselves, or did not end.
    """

    place: Place
    killed: set[str] = field(default_factory=set)
    pauses: list[Pause] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.chaos.programs"])
        self._running: dict[str, Running] = {}
        self._pids: list[int] = []
        self._started = 0

    @property
    def unpaused(self) -> list[str]:
        """Roles whose process runs."""
        return [role for role, each in self._running.items() if each.paused_at is None]

    def start(self, role: str) -> None:
        """Start a process for a role."""
        self._started += 1
        name = f"{role}-{self._started}"
        process = self._context.Process(target=run, args=(role, name, self.place), daemon=True)
        process.start()
        self._running[role] = running = Running(name, process)
        self._pids.append(running.pid)

    def start_all(self) -> None:
        """Start a process for each role, except the heir."""
        for role in ROLES:
            if role != HEIR:
                self.start(role)

    def roles(self, part: str) -> list[str]:
        """Return the roles of a part that have a process."""
        return [role for role in self._running if ROLES[role].part == part]

    def kill(self, role: str, *, replace: bool = True) -> None:
        """End a role's process with SIGKILL, and start another one."""
        running = self._running.pop(role)
        running.process.kill()
        running.process.join()
        if running.process.exitcode == -signal.SIGKILL:
            self.killed.add(running.name)
        if replace:
            self.start(role)

    def pause(self, role: str) -> None:
        """Stop a role's process with SIGSTOP."""
        running = self._running[role]
        running.paused_at = time.monotonic()
        os.kill(running.pid, signal.SIGSTOP)

    def resume(self, role: str) -> None:
        """Continue a process that was stopped."""
        running = self._running[role]
        if running.paused_at is not None:
            os.kill(running.pid, signal.SIGCONT)
            self.pauses.append(Pause(running.name, running.paused_at, time.monotonic()))
            running.paused_at = None

    def replace_ended(self) -> None:
        """Note processes that ended by themselves, and start others."""
        for role, running in list(self._running.items()):
            if not running.process.is_alive():
                self.findings.append(f"{running.name} ended with {running.process.exitcode}")
                self.start(role)

    def end(self, part: str, seconds: float) -> None:
        """Ask the makers, or the others, to end; kill and note those that do not."""
        self.place.ends(part).touch()
        roles = self.roles(part)
        until = time.monotonic() + seconds
        for role in roles:
            running = self._running.pop(role)
            running.process.join(max(0.0, until - time.monotonic()))
            if running.process.is_alive():
                self.findings.append(f"{running.name} did not end within {seconds:.0f} s")
                os.kill(running.pid, signal.SIGUSR1)  # writes its stacks to its log
                running.process.join(1)
                running.process.kill()
                running.process.join()
                self.killed.add(running.name)
            elif running.process.exitcode:
                self.findings.append(f"{running.name} ended with {running.process.exitcode}")

    def close(self) -> None:
        """Kill all workers that are left."""
        for running in self._running.values():
            running.process.kill()
            running.process.join()
        self._running.clear()

    def left(self) -> list[str]:
        """Return processes that workers started and that still run."""
        groups = set(self._pids)
        found = []
        for process in psutil.process_iter(["pid", "cmdline"]):
            try:
                if os.getpgid(process.pid) in groups:
                    found.append(f"process {process.pid}: {process.info['cmdline']}")
            except ProcessLookupError:
                continue
        return found
