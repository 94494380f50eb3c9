"""`METRICS`: the metrics that `metrics.toml` lists, and how each is read from a state."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Final, Literal, TypeAlias

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.core import (
    Metric as Family,
)
from prometheus_client.registry import Collector

from redrb.watch.state.findings import findings_of
from redrb.watch.state.histogram import BOUNDS
from redrb.watch.state.model import State, TaskState, WorkerState
from redrb.watch.state.observer import View

Things: TypeAlias = Callable[[State], Iterable[tuple[tuple[str, ...], Any]]]
"""Returns values of the labels after `namespace`, and a part of a state that has figures."""

MOST_WORKERS = 200
"""Most workers with metrics of their own; `redrb_workers` counts all."""

DEAD_S = 600.0
"""Seconds after its last announcement for which a dead worker is shown."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: a line of `metrics.toml`, which says what its fields mean."""

    name: str
    help: str
    labels: tuple[str, ...]
    things: Things
    source: str
    kind: Literal["counter", "gauge", "histogram"]

    def read(self, state: State) -> Iterator[tuple[tuple[str, ...], Any]]:
        """Yield values of the labels, and the value: a number, or of a histogram a `Histogram`."""
        for labels, thing in self.things(state):
            places = (_at(thing, path) for path in self.source.split("|"))
            value = next((found for found in places if found is not None), None)
            if value is not None:
                yield labels, value


def _at(thing: Any, path: str) -> Any:
    for name in filter(None, path.removesuffix("?").split(".")):
        if isinstance(thing, Mapping):
            thing = thing.get(name)
        else:
            thing = None if thing is None else getattr(thing, name)
    return (thing or None) if path.endswith("?") else thing


def namespaces(state: State) -> Iterable[tuple[tuple[str, ...], Any]]:
    """Return the state itself."""
    return [((), state)]


def findings(state: State) -> Iterable[tuple[tuple[str, ...], Any]]:
    """Return numbers of findings, by severity and code."""
    return Counter((each.severity, each.code) for each in findings_of(state)).items()


def tasks(state: State) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield each task that can be read."""
    for task in state.tasks:
        if task.readable and task.groups:
            yield (task.name,), task


def groups(state: State) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield each consumer group of each task."""
    for (name,), task in tasks(state):
        for group in task.groups:
            yield (name, group.name), group


def pools(state: State) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield how many groups wait, by status."""
    for labels, group in groups(state):
        found = {status.value: number for status, number in group.stats.waiting.items()}
        for status, number in ({"completed": 0} | found).items():
            yield (*labels, status), number


def staleness(state: State) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the staleness of waiting and of leased groups."""
    for labels, group in groups(state):
        yield (*labels, "waiting"), group.staleness.waiting
        yield (*labels, "leased"), group.staleness.leased


def lives(state: State) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield how many workers a task has, by role and life."""
    for task in state.tasks:
        counted = Counter((worker.role, worker.life) for worker in task.workers)
        for (role, life), number in counted.items():
            yield (task.name, role, life), number


def shown_workers(state: State) -> Iterator[tuple[tuple[str, ...], WorkerState]]:
    """Yield the workers that have metrics of their own: those that announced themselves last.

    Workers that have ended are left out, and dead ones ten minutes after their last announcement.
    """
    found: list[tuple[TaskState, WorkerState]] = [
        (task, worker)
        for task in state.tasks
        for worker in task.workers
        if worker.life != "ended" and (worker.life != "dead" or worker.seen_s < DEAD_S)
    ]
    found.sort(key=lambda each: each[1].seen_s)
    for task, worker in found[:MOST_WORKERS]:
        yield (task.name, worker.role, worker.name), worker


def live_workers(state: State) -> Iterator[tuple[tuple[str, ...], WorkerState]]:
    """Yield those of `shown_workers` that are not dead."""
    return (each for each in shown_workers(state) if each[1].alive)


def workers_with_weights(state: State) -> Iterator[tuple[tuple[str, ...], WorkerState]]:
    """Yield those of `live_workers` that have a weight version."""
    return (each for each in live_workers(state) if each[1].weight_version)


def waiting_workers(state: State) -> Iterator[tuple[tuple[str, ...], WorkerState]]:
    """Yield those of `live_workers` that wait, with a label for what they wait for."""
    for labels, worker in live_workers(state):
        if worker.waits_for:
            yield (*labels, worker.waits_for), worker


def tables(state: State) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the tables that can be read."""
    return (((each.name,), each) for each in state.tables if each.readable)


def claims(state: State) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the tasks that claim rows of tables."""
    return (((*at, each.name), each) for at, table in tables(state) for each in table.claims)


def weights(state: State) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the weights that can be read."""
    return (((each.name,), each) for each in state.weights if each.readable)


def servers(state: State) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the servers; of a cluster all primaries."""
    return (((server.address,), server) for server in state.servers)


def _read(text: str) -> Iterator[Metric]:
    kinds: dict[str, Any] = {"histograms": groups, **globals()}
    for title, section in tomllib.loads(text).items():
        labels = tuple(section.pop("labels"))
        for name, (source, help_text) in section.items():
            kind: Any = "counter" if name.endswith("_total") else "gauge"
            kind = "histogram" if title == "histograms" else kind
            yield Metric(name, help_text, labels, kinds[title], source, kind)


METRICS = tuple(_read((files("redrb.watch.metrics") / "metrics.toml").read_text("utf-8")))

UP = ("redrb_up", "1 if the newest figures of Redis are fresh; 0 if Redis does not answer.")
AGE = (
    "redrb_state_age_seconds",
    "Seconds since the figures were read. Beyond five seconds only this and redrb_up are served.",
)
"""The two gauges that are served whatever happens: name and help."""

FRESH_S: Final = 5.0
"""Oldest figures, in seconds, that are served; older ones would look like new ones."""


class StateCollector(Collector):
    """Turns views into metric families; a scrape never waits for Redis."""

    def __init__(self, newest: Callable[[], View], namespace: str) -> None:
        """Make a collector of views that `newest` returns at once, as `Observer.newest` does."""
        self._newest = newest
        self._namespace = namespace

    def describe(self) -> Iterator[Family]:
        """Return no families, so that a registry takes the collector before the first look."""
        return iter(())

    def collect(self) -> Iterator[Family]:
        """Return the metrics of the newest view; those of an old one are left out."""
        view = self._newest()
        fresh = view.state is not None and view.age_s <= FRESH_S
        for (name, text), value in ((UP, float(fresh)), (AGE, view.age_s)):
            family = GaugeMetricFamily(name, text, labels=["namespace"])
            family.add_metric([self._namespace], value)
            yield family
        if fresh and view.state is not None:
            for metric in METRICS:
                yield self._family(metric, view.state)

    def _family(self, metric: Metric, state: State) -> Family:
        named = (metric.name, metric.help)
        labels = ["namespace", *metric.labels]
        if metric.kind == "histogram":
            histograms = HistogramMetricFamily(*named, labels=labels)
            ends = [*(f"{bound}.0" for bound in BOUNDS), "+Inf"]
            for values, found in metric.read(state):
                buckets = [(end, float(sum(found.counts[: at + 1]))) for at, end in enumerate(ends)]
                total = found.total * (found.mean or 0.0)
                histograms.add_metric([self._namespace, *values], buckets, total)
            return histograms
        kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
        family = kind(*named, labels=labels)
        for values, found in metric.read(state):
            family.add_metric([self._namespace, *values], float(found))
        return family
