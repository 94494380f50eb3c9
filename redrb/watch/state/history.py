"""`History`: a few figures of each task over the last minutes, for curves and sparklines."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from redrb.watch.state.model import State, TaskState

MOST_POINTS = 600
"""Points of a task that are kept: ten minutes of looks each second."""


@dataclass(frozen=True, slots=True)
class Point:
    """The figures of a task at one look.

    Attributes:
        put: Groups put a second; None at the first look.
        acked: Groups acknowledged a second; None at the first look.
        staleness: Mean staleness of the waiting groups; None if it is not known.
        reward: Mean of the rewards that its trainers announced last, or without one its makers;
            None if nobody announced one.
    """

    time: float
    put: float | None
    acked: float | None
    waiting: int | None
    leased: int | None
    staleness: float | None
    reward: float | None


class History:
    """The newest points of each task; one thread adds, and any thread reads."""

    def __init__(self) -> None:
        self._points: dict[str, deque[Point]] = {}

    def add(self, state: State) -> None:
        """Add a point of each task of a state; tasks that are gone are forgotten."""
        names = {task.name for task in state.shown}
        kept = {name: points for name, points in self._points.items() if name in names}
        for task in state.shown:
            points = kept.setdefault(task.name, deque(maxlen=MOST_POINTS))
            points.append(point_of(task, state.time))
        self._points = kept

    def curve(self, task: str, name: str) -> list[float | None]:
        """Return a figure of a task at each of the last looks, such as "waiting"; newest last."""
        return [getattr(point, name) for point in self.of(task)]

    def of(self, task: str) -> list[Point]:
        """Return the points of a task, the newest last."""
        return list(self._points.get(task, ()))


def point_of(task: TaskState, time: float) -> Point:
    """Return the figures of a task in a state of this time."""
    main, rates = task.main, task.rates
    reward = _reward(task, "trainer")
    return Point(
        time=time,
        put=rates.put if rates else None,
        acked=rates.acked if rates else None,
        waiting=main.stats.ledger.waiting if main else None,
        leased=main.stats.ledger.leased if main else None,
        staleness=main.staleness.waiting.mean if main else None,
        reward=_reward(task, "maker") if reward is None else reward,
    )


def _reward(task: TaskState, role: str) -> float | None:
    rewards = [
        worker.metrics["reward"]
        for worker in task.workers
        if worker.role == role and worker.life == "live" and "reward" in worker.metrics
    ]
    return sum(rewards) / len(rewards) if rewards else None
