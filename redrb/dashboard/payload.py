"""What the page is sent: views and histories as data that JSON can hold."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any, Protocol

from redrb.state.histogram import bucket_names
from redrb.state.model import State, TaskState
from redrb.state.view import View


class Observing(Protocol):
    """Knows the newest state: `redrb.state.observer.Observer`."""

    def newest(self) -> View:
        """Return the newest view; never blocks."""

    def wait(self, number: int, timeout_s: float) -> View:
        """Return a view with another number or another error, or the same after a time."""

    def points(self) -> dict[str, list[tuple[float, dict[str, float | None]]]]:
        """Return the points of each task that are kept: time in seconds, figures by name."""


def encoded(data: object) -> str:
    """Return JSON for a browser: figures that JSON cannot hold become null."""
    return json.dumps(_finite(data), separators=(",", ":"), allow_nan=False)


def view_data(view: View) -> dict[str, Any]:
    """Return a view, with its age and a point of each task for the curves."""
    return {
        "number": view.number,
        "age_s": view.age_s,
        "error": view.error,
        "findings": [asdict(finding) for finding in view.findings],
        "state": None if view.state is None else state_data(view.state),
        "points": {} if view.state is None else {t.name: point_of(t) for t in view.state.tasks},
    }


def history_data(observing: Observing) -> dict[str, Any]:
    """Return the points that are kept, and the names of the buckets of all histograms."""
    return {"buckets": bucket_names(), "points": observing.points()}


def state_data(state: State) -> dict[str, Any]:
    """Return a state with the sums that the page shows beside it."""
    data = asdict(state)
    for task, shown in zip(state.tasks, data["tasks"], strict=True):
        for group, stats in zip(task.groups, shown["groups"], strict=True):
            stats["stats"]["ledger_balanced"] = group.stats.ledger.balanced
    return data


def point_of(task: TaskState) -> dict[str, float | None]:
    """Return the figures of a task that the curves show."""
    main, rates = task.main, task.rates
    rewards = [worker.metrics["reward"] for worker in task.workers if "reward" in worker.metrics]
    return {
        "put": rates.put if rates else None,
        "acked": rates.acked if rates else None,
        "waiting": main.stats.ledger.waiting if main else None,
        "leased": main.stats.ledger.leased if main else None,
        "staleness": main.staleness.waiting.mean if main else None,
        "reward": sum(rewards) / len(rewards) if rewards else None,
    }


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return list(map(_finite, value))
    return None if isinstance(value, float) and not math.isfinite(value) else value
