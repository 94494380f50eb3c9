"""`Metric`: one metric of a namespace, and the way from a state to its samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from redrb.state.histogram import Histogram
from redrb.state.model import ConsumerGroupState, ServerState, State, TaskState, WeightsState

Kind: TypeAlias = Literal["counter", "gauge", "histogram"]
"""counter: only grows, until its task is created anew; gauge: may also fall."""

Value: TypeAlias = float | Histogram | None
"""A histogram is the value of a metric of this kind; None: there is no sample."""

Sample: TypeAlias = tuple[tuple[str, ...], float | Histogram]
"""Values of the metric's labels after `namespace`, and the sample's value."""

Read: TypeAlias = Callable[[State], Iterator[Sample]]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        name: Its name with its unit, as Prometheus shows it.
        kind: Its type.
        help: What it counts or measures.
        labels: Its labels after `namespace`, which every metric has.
        read: Returns its samples in a state.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...]
    read: Read


def of_server(
    name: str, kind: Kind, text: str, value: Callable[[ServerState], float | None]
) -> Metric:
    """Return a metric with a sample for each server."""

    def read(state: State) -> Iterator[Sample]:
        for server in state.servers:
            yield from _sample((server.address,), value(server))

    return Metric(name, kind, text, ("server",), read)


def of_weights(
    name: str, kind: Kind, text: str, value: Callable[[WeightsState], float | None]
) -> Metric:
    """Return a metric with a sample for each name of weights that can be read."""

    def read(state: State) -> Iterator[Sample]:
        for weights in state.weights:
            if weights.readable:
                yield from _sample((weights.name,), value(weights))

    return Metric(name, kind, text, ("weights",), read)


def of_task(name: str, kind: Kind, text: str, value: Callable[[TaskState], Value]) -> Metric:
    """Return a metric with a sample for each task that can be read."""

    def read(state: State) -> Iterator[Sample]:
        for task in _readable(state):
            yield from _sample((task.name,), value(task))

    return Metric(name, kind, text, ("task",), read)


def of_group(
    name: str, kind: Kind, text: str, value: Callable[[ConsumerGroupState], Value]
) -> Metric:
    """Return a metric with a sample for each consumer group of each task."""

    def read(state: State) -> Iterator[Sample]:
        for task in _readable(state):
            for group in task.groups:
                yield from _sample((task.name, group.name), value(group))

    return Metric(name, kind, text, ("task", "group"), read)


def _readable(state: State) -> Iterator[TaskState]:
    return (task for task in state.tasks if task.readable and task.groups)


def _sample(labels: tuple[str, ...], value: Value) -> Iterator[Sample]:
    if value is not None:
        yield labels, value
