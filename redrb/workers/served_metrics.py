"""Serves the events of a worker to Prometheus, at the port of its option `--metrics-port`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from redrb.checks import require_package
from redrb.errors import ConfigError
from redrb.metrics.events import Write

MOST_PORT = 65_535


@contextmanager
def metrics_served(
    host: str, first_port: int, *, namespace: str, task: str, worker: str, rank: int = 0
) -> Iterator[Write]:
    """Serve metrics in this block; returns the function that events are written with.

    Args:
        host: Address to listen on.
        first_port: Port of the first rank; each rank has the next one.
        namespace: The namespace of the worker.
        task: Its task.
        worker: Its name.
        rank: Its rank among data-parallel trainers.

    Raises:
        ConfigError: prometheus_client is missing, or the port cannot be used.
    """
    port = first_port + rank
    if port > MOST_PORT:
        raise ConfigError(
            f"rank {rank} would serve its metrics at port {port}: --metrics-port plus the rank "
            f"must be at most {MOST_PORT}."
        )
    require_package("prometheus_client", extra="metrics")
    from redrb.metrics.serving import MetricsServer
    from redrb.metrics.worker_metrics import WorkerMetrics

    metrics = WorkerMetrics(namespace=namespace, task=task, worker=worker, rank=rank)
    with MetricsServer(metrics.registry, host=host, port=port):
        yield metrics.write
