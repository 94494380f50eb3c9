"""Sampled OpenTelemetry spans of a group's way to its trainer: docs/how-to/tracing.md.

Off, this imports nothing of OpenTelemetry, and groups have no bytes for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from redrb.checks import checked_number, require_package
from redrb.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

    from redrb.stream.tracing.spans import GroupTracer

__all__ = ["SAMPLE_RATE", "active", "disable", "enable"]

SAMPLE_RATE = 0.01
"""Share of the groups whose way is traced."""

_tracer: GroupTracer | None = None


def enable(
    sample_rate: float = SAMPLE_RATE, *, tracer_provider: TracerProvider | None = None
) -> None:
    """Trace the way of some groups that this process puts, and of all traced ones that it takes.

    Args:
        sample_rate: Share of the groups put here that are traced, from 0 to 1. A group whose maker
            traced it is traced on, and no other.
        tracer_provider: Where spans go; default: OpenTelemetry's global provider.

    Raises:
        ConfigError: The rate is out of range, or OpenTelemetry is not installed.
    """
    global _tracer
    rate = checked_number("sample_rate", sample_rate)
    if not 0 <= rate <= 1:
        raise ConfigError(f"sample_rate={sample_rate}: it must be from 0 to 1.")
    require_package("opentelemetry", extra="otel")
    from opentelemetry.trace import get_tracer_provider

    from redrb.stream.tracing.spans import GroupTracer

    _tracer = GroupTracer(tracer_provider or get_tracer_provider(), rate)


def disable() -> None:
    """Trace no more; spans that have begun end as before."""
    global _tracer
    _tracer = None


def active() -> GroupTracer | None:
    """Return what traces groups in this process; None: nothing does."""
    return _tracer
