"""The table of all metrics of a namespace, as `redrb exporter` serves them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from redrb.metrics.metric import Metric, Sample
from redrb.metrics.of_servers import SERVER_METRICS, WEIGHTS_METRICS
from redrb.metrics.of_tasks import TASK_METRICS
from redrb.metrics.of_workers import WORKER_METRICS
from redrb.state.findings import findings_of
from redrb.state.model import State

UP = ("redrb_up", "1 if the newest figures of Redis are fresh; 0 if Redis does not answer.")
AGE = (
    "redrb_state_age_seconds",
    "Seconds since the figures were read. Beyond five seconds only this and redrb_up are served.",
)
"""The two gauges that are served whatever happens: name and help."""


def _findings(state: State) -> Iterator[Sample]:
    found = Counter((finding.severity, finding.code) for finding in findings_of(state))
    yield from found.items()


NAMESPACE_METRICS: tuple[Metric, ...] = (
    Metric(
        "redrb_look_seconds",
        "gauge",
        "Seconds that the newest look at Redis took.",
        (),
        lambda state: iter([((), state.took_s)]),
    ),
    Metric(
        "redrb_tasks",
        "gauge",
        "Tasks of the namespace; at most 200 of them have metrics.",
        (),
        lambda state: iter([((), float(state.tasks_total))]),
    ),
    Metric(
        "redrb_findings",
        "gauge",
        "Troubles that `redrb doctor` would name, by severity and code (docs/doctor.md).",
        ("severity", "code"),
        _findings,
    ),
)

METRICS: tuple[Metric, ...] = (
    *NAMESPACE_METRICS,
    *TASK_METRICS,
    *WORKER_METRICS,
    *WEIGHTS_METRICS,
    *SERVER_METRICS,
)
"""All metrics of a state."""
