"""`Feed`: passes each new view on to all pages that listen, as server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import asdict, fields, replace
from functools import partial
from typing import Any

import anyio.to_thread
import msgspec

from redrb.watch.state.histogram import bucket_names
from redrb.watch.state.history import Point, point_of
from redrb.watch.state.observer import Observer, View

EVERY_S = 1.0
"""Seconds after which a view is sent again, so that a page knows how old its figures are."""


MOST_PAGES = 64
"""Most pages that follow at the same time."""


_COLUMNS = [field.name for field in fields(Point)]


class Feed:
    """One task waits for views; each page waits for this task, and misses views when it is slow.

    JSON of views and histories is made in threads: that of many tasks takes long.
    """

    def __init__(self, observer: Observer) -> None:
        self.pages = 0
        self._observer = observer
        self._changed = asyncio.Condition()
        self._newest = ""
        self._sent = 0
        self._closed = False

    async def run(self) -> None:
        """Wait for views until the feed is closed; an error closes it."""
        number, error = -1, ""
        try:
            while not self._closed:
                wait = partial(self._next, number, error)
                view, event = await anyio.to_thread.run_sync(wait, abandon_on_cancel=True)
                number, error = view.number, view.error
                async with self._changed:
                    self._newest = event
                    self._sent += 1
                    self._changed.notify_all()
        finally:
            await self.close()

    async def close(self) -> None:
        """End all events."""
        self._closed = True
        async with self._changed:
            self._changed.notify_all()

    async def events(self) -> AsyncIterator[str]:
        """Yield the history, then each new view, until the feed is closed."""
        sent = self._sent
        yield await anyio.to_thread.run_sync(self._history, abandon_on_cancel=True)
        yield _event("view", encoded(view_data(self._observer.newest())))
        while not self._closed:
            async with self._changed:
                while not self._closed and self._sent == sent:
                    await self._changed.wait()
                sent, event = self._sent, self._newest
            if not self._closed:
                yield event

    def _next(self, number: int, error: str) -> tuple[View, str]:
        view = self._observer.wait(number, EVERY_S, error=error)
        return view, _event("view", encoded(view_data(view)))

    def _history(self) -> str:
        return _event("history", encoded(history_data(self._observer)))


def _event(name: str, data: str) -> str:
    return f"event: {name}\ndata: {data}\n\n"


def encoded(data: object) -> str:
    """Return JSON for a browser: figures that JSON cannot hold become null."""
    return msgspec.json.encode(data).decode()


def view_data(view: View) -> dict[str, Any]:
    """Return a view, with its age and a point of each task for the curves."""
    state = view.state
    tasks = () if state is None else state.shown
    data = None if state is None else asdict(replace(state, tasks=tasks, sums=()))
    for task, shown in zip(tasks, data["tasks"] if data else (), strict=True):
        for group, sent in zip(task.groups, shown["groups"], strict=True):
            sent["stats"]["ledger_balanced"] = group.stats.ledger.balanced
    return {
        "number": view.number,
        "age_s": view.age_s,
        "error": view.error,
        "findings": view.findings,
        "state": data,
        "points": _columns({task.name: [point_of(task, state.time)] for task in tasks})
        if state is not None
        else {},
    }


def history_data(observer: Observer) -> dict[str, Any]:
    """Return the points that are kept, and the names of the buckets of all histograms."""
    state = observer.newest().state
    names = [task.name for task in state.shown] if state is not None else []
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
