"""The data that the page is sent: views and histories as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, fields
from typing import Any

import msgspec

from redrb.state.histogram import bucket_names
from redrb.state.history import Point, point_of
from redrb.state.observer import Observer, View

_COLUMNS = [field.name for field in fields(Point)]


def encoded(data: object) -> str:
    """Return JSON for a browser: figures that JSON cannot hold become null."""
    return msgspec.json.encode(data).decode()


def view_data(view: View) -> dict[str, Any]:
    """Return a view, with its age and a point of each task for the curves."""
    state = view.state
    data = None if state is None else asdict(state)
    for task, shown in zip(state.tasks, data["tasks"], strict=True) if state and data else ():
        for group, sent in zip(task.groups, shown["groups"], strict=True):
            sent["stats"]["ledger_balanced"] = group.stats.ledger.balanced
    return {
        "number": view.number,
        "age_s": view.age_s,
        "error": view.error,
        "findings": view.findings,
        "state": data,
        "points": _columns({task.name: [point_of(task, state.time)] for task in state.tasks})
        if state is not None
        else {},
    }


def history_data(observer: Observer) -> dict[str, Any]:
    """Return the points that are kept, and the names of the buckets of all histograms."""
    state = observer.newest().state
    names = [task.name for task in state.tasks] if state is not None else []
    return {
        "buckets": bucket_names(),
        "points": _columns({name: observer.history.of(name) for name in names}),
    }


def _columns(points: dict[str, list[Point]]) -> dict[str, dict[str, list[float | None]]]:
    """Return points with each name once: lists of as many figures as there are points."""
    return {
        task: {name: _figures(getattr(one, name) for one in rows) for name in _COLUMNS}
        for task, rows in points.items()
    }


def _figures(values: Iterable[float | None]) -> list[float | None]:
    return [value if value is None else round(value, 3) for value in values]
