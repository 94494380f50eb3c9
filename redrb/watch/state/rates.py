"""`RateWindow`: adds the rates of the last seconds to each state."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from redrb.watch.state.model import Rates, ServerState, State, TaskState, WorkerState

SHORTEST_S: Final = 0.2
"""Shortest time between two looks over which a rate means something."""

WINDOW_S: Final = 10.0
"""Time over which counts become rates: a trainer with a batch each 3 s has a steady rate."""

_FATES: Final = ("put", "acked", "expired", "filtered", "evicted", "dead")
_SUMS: Final = ("samples_put", "samples_acked", "bytes_put")


class RateWindow:
    """The counters of the last seconds; not safe among threads.

    A task that was created anew, a worker that started anew, and a server that restarted have no
    rates until the next look.
    """

    def __init__(self) -> None:
        self._before: dict[tuple[str, ...], _Trail] = {}
        self._now: dict[tuple[str, ...], _Trail] = {}

    def rated(self, state: State) -> State:
        """Return a state with rates since earlier states of its namespace, and keep its counters.

        A rate is that of `WINDOW_S` seconds, or of the time since the first look.
        """
        self._before, self._now = self._now, {}  # what is gone by now is forgotten
        return replace(
            state,
            tasks=tuple(self._task(task, state.time) for task in state.tasks),
            servers=tuple(self._server(server, state.time) for server in state.servers),
        )

    def _task(self, task: TaskState, now_s: float) -> TaskState:
        main = task.main
        if main is None:
            return task
        joined = str(main.stats.joined)  # then the ledger of a consumer group begins anew
        trail = self._trail("task", task.name, task.incarnation, main.name, joined)
        ledger = (getattr(main.stats.ledger, fate) for fate in _FATES)
        trail.add(now_s, [*ledger, *(getattr(main.stats, name) for name in _SUMS)])
        rates = trail.rates and dict(zip((*_FATES, *_SUMS), trail.rates, strict=True))
        return replace(
            task,
            rates=Rates(over_s=trail.over_s, **rates) if rates else None,
            workers=tuple(self._worker(worker, task, now_s) for worker in task.workers),
        )

    def _worker(self, worker: WorkerState, task: TaskState, now_s: float) -> WorkerState:
        """Return a worker with its rate: between announcements, and 0 when these have stopped."""
        trail = self._trail("worker", task.name, task.incarnation, worker.name)
        if not trail.grows([worker.groups, worker.uptime_s]):
            trail = self._now["worker", task.name, task.incarnation, worker.name] = _Trail()
        trail.add(now_s - worker.seen_s, [worker.groups, worker.uptime_s, worker.samples])
        if not worker.alive or (worker.life == "silent" and worker.seen_s >= WINDOW_S):
            return replace(worker, groups_per_s=0.0, samples_per_s=0.0)
        if not trail.rates:
            return worker
        groups, _, samples = trail.rates
        return replace(worker, groups_per_s=groups, samples_per_s=samples)

    def _server(self, server: ServerState, now_s: float) -> ServerState:
        trail = self._trail("server", server.address)
        if not trail.grows([server.cpu_s]):
            trail = self._now["server", server.address] = _Trail()
        trail.add(now_s, [server.cpu_s])
        return replace(server, cpu_share=trail.rates[0]) if trail.rates else server

    def _trail(self, *name: str) -> _Trail:
        return self._now.setdefault(name, self._before.get(name) or _Trail())


class _Trail:
    """Some counters at some times.

    Attributes:
        over_s: Seconds from the oldest time to the newest.
        rates: How much each counter has grown a second in this time; empty after the first time.
    """

    def __init__(self) -> None:
        self.over_s = 0.0
        self.rates: list[float] = []
        self._points: deque[tuple[float, Sequence[float]]] = deque()

    def grows(self, counters: Sequence[float]) -> bool:
        """Return whether the first counters are not below their newest values."""
        newest = self._points[-1][1] if self._points else ()
        return all(now >= then for now, then in zip(counters, newest, strict=False))

    def add(self, time_s: float, counters: Sequence[float]) -> None:
        """Add the counters at a time, unless it is hardly later than the newest one."""
        points = self._points
        since_s = time_s - points[-1][0] if points else SHORTEST_S
        if since_s <= -SHORTEST_S:  # the server's clock was set back
            points.clear()
            self.rates = []
        elif since_s < SHORTEST_S:  # the same announcement, or the next look came too soon
            return
        points.append((time_s, counters))
        while len(points) > 2 and time_s - points[1][0] >= WINDOW_S:
            points.popleft()
        first_s, first = points[0]
        self.over_s = time_s - first_s
        if len(points) > 1:
            pairs = zip(counters, first, strict=True)
            self.rates = [max(0.0, now - then) / self.over_s for now, then in pairs]
