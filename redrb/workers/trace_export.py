"""Traces the groups of a worker, and sends the spans to a collector of OpenTelemetry."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from redrb import tracing
from redrb.checks import require_package

EXPORT_S = 5.0
"""Longest time of one request to the collector, also of the last one at the worker's end."""


@contextmanager
def tracing_to_collector(
    service: str, worker: str = "", *, rate: float = tracing.SAMPLE_RATE
) -> Iterator[None]:
    """Trace groups in this block; OpenTelemetry's variables OTEL_* name the collector.

    Args:
        service: Name of the service.
        worker: Name of this process; "": none.
        rate: Share of the groups put here that are traced.

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """
    for package in ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"):
        require_package(package, extra="otel")
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    named = {"service.name": service} | ({"service.instance.id": worker} if worker else {})
    provider = TracerProvider(resource=Resource.create(named), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(timeout=EXPORT_S)))
    tracing.enable(rate, tracer_provider=provider)
    try:
        yield
    finally:
        tracing.disable()
        provider.shutdown()
