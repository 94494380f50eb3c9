"""`WorkerMetrics`: gives Prometheus the events of this process."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    SummaryMetricFamily,
)
from prometheus_client.core import (
    Metric as Family,
)
from prometheus_client.registry import Collector

from redrb.metrics.events import numbers_of
from redrb.metrics.of_events import EVENT_METRICS, EventMetric

LABELS: Final = ("namespace", "task", "worker", "rank")
"""Labels of every metric of a worker's process."""


class WorkerMetrics(Collector):
    """Adds up the events of a worker; `registry` also has its processor time and memory.

    Attributes:
        registry: What a `MetricsServer` serves.
    """

    def __init__(self, *, namespace: str, task: str, worker: str, rank: int = 0) -> None:
        """Make metrics without values.

        Args:
            namespace: The namespace of the worker.
            task: Its task.
            worker: Its name.
            rank: Its rank among data-parallel trainers.
        """
        self._labels = [namespace, task, worker, str(rank)]
        self._sums: dict[str, float] = {}
        self._counts: defaultdict[str, int] = defaultdict(int)
        self._lock = threading.Lock()
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def describe(self) -> Iterator[Family]:
        """Return no families: the registry takes the collector before the first event."""
        return iter(())

    def write(self, event: str, **values: object) -> None:
        """Count an event; it is a `redrb.metrics.events.Write`."""
        numbers = dict(numbers_of(values))
        with self._lock:
            for metric in EVENT_METRICS:
                if metric.event == event:
                    self._add(metric, numbers)

    def collect(self) -> Iterator[Family]:
        """Return the metrics of the events so far."""
        with self._lock:
            sums, counts = dict(self._sums), dict(self._counts)
        for metric in EVENT_METRICS:
            if metric.name in sums:
                yield self._family(metric, sums[metric.name], counts[metric.name])

    def _add(self, metric: EventMetric, numbers: Mapping[str, float]) -> None:
        value = 1.0
        if metric.keys:
            key = next((key for key in metric.keys if key in numbers), None)
            if key is None:
                return
            value = numbers[key]
        before = 0.0 if metric.kind == "gauge" else self._sums.get(metric.name, 0.0)
        self._sums[metric.name] = before + value
        self._counts[metric.name] += 1

    def _family(self, metric: EventMetric, value: float, count: int) -> Family:
        labels = list(LABELS)
        if metric.kind == "summary":
            summary = SummaryMetricFamily(metric.name, metric.help, labels=labels)
            summary.add_metric(self._labels, count, value)
            return summary
        kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
        family = kind(metric.name, metric.help, labels=labels)
        family.add_metric(self._labels, value)
        return family
