"""`StateCollector`: gives Prometheus the newest state that an observer has read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.core import (
    Metric as Family,
)
from prometheus_client.registry import Collector

from redrb.metrics.metric import METRICS, Metric
from redrb.state.histogram import BOUNDS
from redrb.state.model import State
from redrb.state.observer import View

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
