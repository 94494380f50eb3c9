"""`Worker`: what a process announces of itself to those who look at the task."""

from __future__ import annotations

import itertools
import logging
import math
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

from redrb import __version__
from redrb.errors import StoreDenied
from redrb.experience.faults import newest_fault
from redrb.forks import in_child
from redrb.processes import process_name
from redrb.stream.announcement import (
    MOST_ADDRESS,
    MOST_FAULT,
    MOST_METRICS,
    MOST_NAME,
    Announcement,
    Role,
    WaitsFor,
    WorkerEnd,
    packed,
)
from redrb.stream.heartbeat import Heartbeat, period_s
from redrb.stream.task.calls import Announce
from redrb.stream.task.task import Task

_log = logging.getLogger("redrb")

_SHARE = 0.98
"""Share of the longest step that is left after another one: 34 steps halve it."""


class Steps:
    """The steps of one worker: each lasts from its batch to the request for the next one.

    Any thread may note a step; with several that train at once, the newest step counts.

    Attributes:
        limit_s: Seconds after which a step hangs; 0: as its steps before show.
        usual_s: Longest step of late: after each further step it counts less; 0 before the first.
        ended: Steps that have ended.
        total_s: Seconds that they lasted.
    """

    def __init__(self, limit_s: float = 0.0) -> None:
        self.limit_s, self.usual_s = limit_s, 0.0
        self.ended, self.total_s = 0, 0.0
        self._thread = threading.local()
        self._began: float | None = None

    @property
    def lasted_s(self) -> float:
        """Seconds since the step began; 0 between two steps."""
        began = self._began
        return 0.0 if began is None else time.monotonic() - began

    def begin(self) -> None:
        """Note that a step begins."""
        self._began = time.monotonic()

    def end(self) -> None:
        """Note that the step has ended, if one had begun."""
        if self._began is not None:
            lasted_s, self._began = self.lasted_s, None
            self.usual_s = max(lasted_s, _SHARE * self.usual_s)
            self.ended, self.total_s = self.ended + 1, self.total_s + lasted_s

    @contextmanager
    def fetching(self) -> Iterator[None]:
        """Note in this block, which takes a batch in any number of takes, that no step runs."""
        if getattr(self._thread, "is_ahead", False):
            yield
            return
        self.end()
        with self.ahead():
            yield
        self.begin()

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """Note no takes of this thread in this block; the caller notes the batch itself."""
        self._thread.is_ahead = True
        try:
            yield
        finally:
            self._thread.is_ahead = False


class Holding(Protocol):
    """Holds leases or rights."""

    @property
    def held(self) -> int:
        """How many."""


class Worker:
    """One stream object as others see it: its process, its work, what it waits for.

    The heartbeat of a consumer, and that of rights to begin groups, carries the announcement. A
    stream that only puts has a heartbeat of its own, which sends one when no other has done so.
    Announcements are for people who look: nothing that redrb does depends on them.

    Attributes:
        name: Its name in Redis, which no other stream object has; in a forked process another one.
        label: Name that its owner gives it, such as "maker-1"; "": none.
        role: What it does with the task; None: "trainer" once it has taken groups, else "maker".
        weights_name: Name of the weights to which `weight_version` belongs; "": not known.
        weight_version: Newest weight version that it uses (maker) or has published (trainer).
        metrics: Newest figures, such as "reward" and "loss"; the first 16 are announced. Tensors of
            one element are read then.
        engine: What it samples from; where that has `away_s`, it waits for the engine meanwhile,
            and `where` is the address that is announced.
        steps: Its steps: `steps.limit_s` is the time after which `redrb doctor`, top and the page
            say that a step hangs.
    """

    name: str

    def __init__(self, task: Task, lease_ms: int) -> None:
        """Make a worker; nothing is announced before it puts or takes."""
        self.label = ""
        self.role: Role | None = None
        self.weights_name = ""
        self.weight_version = 0
        self.metrics: Mapping[str, Any] = {}
        self.engine: object = None
        self.steps = Steps()  # replaced in a forked process
        self._task = task
        self._lease_ms = lease_ms
        self._leases: weakref.ref[Holding] | None = None
        self._rights: weakref.ref[Holding] | None = None
        self._closed = False
        self._begin()
        in_child(self._begin)

    def _begin(self) -> None:
        """Become a worker that Redis does not know yet: at first, and in a forked process."""
        self._pid = os.getpid()
        self.name = process_name()
        self.end = WorkerEnd(self._task, self.name)
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._groups = self._samples = self._filtered = 0
        self.steps = Steps(self.steps.limit_s)
        self._takes = False
        self._waits: dict[int, tuple[WaitsFor, float]] = {}
        self._tokens = itertools.count()
        self._announced: float | None = None
        self._denied = False
        self._heartbeat: Heartbeat | None = None

    @property
    def period_s(self) -> float:
        """Seconds between two announcements."""
        return period_s(self._lease_ms)

    def holds(self, leases: Holding, rights: Holding) -> None:
        """Announce also the number of leased groups, and of held rights to begin groups."""
        # weakly, as both refer to this object: a stream is freed as soon as nobody refers to it
        self._leases, self._rights = weakref.ref(leases), weakref.ref(rights)

    def takes(self) -> None:
        """Note that it takes groups; the heartbeat of its consumer announces it."""
        self._takes = True

    def puts(self) -> None:
        """Note that it puts groups; announce it from now on."""
        if self._heartbeat is not None:
            return
        with self._lock:
            if self._heartbeat is None and not self._takes:
                self._heartbeat = Heartbeat(self.beat, self._lease_ms, "worker", self.end.announce)

    def begins(self) -> None:
        """Announce it at once, and from now on: it may wait for long before it puts or takes.

        Raises:
            StoreUnavailable: Redis stayed away.
        """
        self.puts()
        if self._announced is not None:
            return
        if self._heartbeat is not None:
            self._heartbeat.nudge()
        else:  # the heartbeat of its consumer announces it from now on
            self.beat()

    def count(self, groups: int, samples: int, filtered: int = 0) -> None:
        """Note groups that were put or acknowledged, and those of the same put that were not."""
        with self._lock:
            self._groups += groups
            self._samples += samples
            self._filtered = 0 if groups else self._filtered + filtered

    @contextmanager
    def waiting(self, what: WaitsFor) -> Iterator[None]:
        """Announce in this block that it waits for something."""
        token = next(self._tokens)
        self._waits[token] = what, time.monotonic()
        try:
            if what == "weights":  # it has put nothing yet, so that nothing else announces it
                self.begins()
            yield
        finally:
            self._waits.pop(token, None)

    def awaiting_first_weights(self) -> AbstractContextManager[None]:
        """Announce in this block that it waits for weights, if it has begun nothing."""
        begun = self._closed or self._takes or self._groups or self.role not in (None, "maker")
        return nullcontext() if begun else self.waiting("weights")

    def announcement(self) -> bytes:
        """Return the announcement of now, packed."""
        now = time.monotonic()
        said = self._said(now)
        self.end.note(said)
        self._announced = now
        return packed(said)

    def beat(self) -> None:
        """Announce it, unless another heartbeat has just done so."""
        announced = self._announced
        if self._denied or (
            announced is not None and time.monotonic() - announced < 0.9 * self.period_s
        ):
            return
        try:
            self._task.store.call(Announce(self.name, ended=False), self.announcement())
        except StoreDenied as error:
            self._denied = True
            self.end.forget()
            _log.warning(
                "task %r: `redrb top` and others that look do not see this maker: %s",
                self._task.name,
                error,
            )

    def close(self) -> None:
        """Announce the end, if it was announced before; while Redis is away nothing is said."""
        self._closed = True
        with self._lock:
            heartbeat, self._heartbeat = self._heartbeat, None
        if heartbeat is not None:
            heartbeat.stop()
        if self._announced is not None and not self._denied:
            self.end.note(self._said(time.monotonic()))
        self.end.announce()

    def _said(self, now: float) -> Announcement:
        waits = min(list(self._waits.values()), key=lambda wait: wait[1], default=None)
        away_s = getattr(self.engine, "away_s", 0.0)
        if away_s > 0:
            waits = "engine", now - away_s
        with self._lock:
            groups, samples, filtered = self._groups, self._samples, self._filtered
        fault = newest_fault() if filtered else None
        return Announcement(
            role=self.role or ("trainer" if self._takes else "maker"),
            label=self.label[:MOST_NAME],
            host=socket.gethostname()[:MOST_NAME],
            pid=self._pid,
            program=_program()[:MOST_NAME],
            redrb=__version__,
            period_s=self.period_s,
            lease_s=self._lease_ms / 1000,
            uptime_s=now - self._began,
            weights_name=self.weights_name[:MOST_NAME],
            weight_version=max(self.weight_version, 0),
            groups=groups,
            samples=samples,
            filtered=filtered,
            fault=str(fault or "")[:MOST_FAULT],
            leased=_held(self._leases),
            rights=_held(self._rights),
            waits_for=waits[0] if waits else "",
            waits_s=now - waits[1] if waits else 0.0,
            engine=str(getattr(self.engine, "where", ""))[:MOST_ADDRESS],
            step_s=self.steps.lasted_s,
            usual_step_s=self.steps.usual_s,
            step_limit_s=self.steps.limit_s,
            steps=self.steps.ended,
            steps_s=self.steps.total_s,
            metrics=dict(itertools.islice(_figures(self.metrics), MOST_METRICS)),
        )


def _program() -> str:
    """Return the module of `python -m`, or the file name of the program."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec.name if spec else Path(*sys.argv[:1]).name


def _held(holding: weakref.ref[Holding] | None) -> int:
    found = holding() if holding is not None else None
    return 0 if found is None else found.held


def _figures(metrics: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield those metrics that are finite numbers."""
    for name, value in tuple(metrics.items()):
        try:
            figure = float(value)
        except (TypeError, ValueError, RuntimeError):  # a text, or a tensor of several elements
            continue
        if math.isfinite(figure):
            yield str(name)[:MOST_NAME], figure
