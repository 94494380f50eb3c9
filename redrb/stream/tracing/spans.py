"""`GroupTracer`: the spans of groups in this process, joined to those of other processes."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from opentelemetry.context import Context
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    TraceFlags,
    TracerProvider,
    set_span_in_context,
)

from redrb.codec.metadata import GroupTrace

_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-01")


class GroupTracer:
    """Begins the spans of groups: made, put, waiting, taken, trained."""

    def __init__(self, provider: TracerProvider, sample_rate: float) -> None:
        self._tracer = provider.get_tracer("redrb")
        self._rate = sample_rate

    def begin_puts(
        self, task: str, groups: int, *, begun_ns: int, parents: Sequence[str] | None
    ) -> list[PutSpan | None]:
        """Begin the span `put` of each group that is traced.

        `begun_ns` is when they were begun, for the span `made`; 0: not known. `parents` are the
        spans before of forwarded groups; "": the group is not traced.

        Returns:
            The spans; None for a group that is not traced.
        """
        spans: list[PutSpan | None] = []
        now = time.time_ns()
        for place in range(groups):
            parent = _context(parents[place]) if parents is not None else None
            if parent is None and (parents is not None or random.random() >= self._rate):  # noqa: S311
                spans.append(None)
                continue
            attributes = {"redrb.task": task}
            if begun_ns and parents is None:
                made = self._tracer.start_span(
                    "redrb made", parent, attributes=attributes, start_time=min(begun_ns, now)
                )
                made.end(now)
                parent = set_span_in_context(made)
            put = self._tracer.start_span(
                "redrb put", parent, attributes=attributes, start_time=now
            )
            spans.append(PutSpan(put, now) if put.is_recording() else None)
        return spans

    def taken(
        self, task: str, group: str, traces: Iterable[tuple[int, GroupTrace | None]]
    ) -> LeaseTrace | None:
        """Begin the spans of groups that were taken just now.

        `traces` has the id of each group, and what it brought.

        Returns:
            The spans; None if no group is traced.
        """
        now = time.time_ns()
        leased: dict[int, _Leased] = {}
        for seq, trace in traces:
            parent = None if trace is None else _context(trace.parent)
            if trace is None or parent is None:
                continue
            attributes: dict[str, str | int] = {
                "redrb.task": task,
                "redrb.group": group,
                "redrb.id": seq,
            }
            waiting = self._tracer.start_span(
                "redrb waiting", parent, attributes=attributes, start_time=min(trace.put_ns, now)
            )
            waiting.end(now)
            taken = self._tracer.start_span(
                "redrb taken", parent, attributes=attributes, start_time=now
            )
            leased[seq] = _Leased(parent, attributes, taken)
        return LeaseTrace(self, leased) if leased else None

    def begin_trained(self, leased: _Leased) -> Span:
        """Begin the span `trained`."""
        return self._tracer.start_span("redrb trained", leased.parent, attributes=leased.attributes)


@dataclass(frozen=True, slots=True)
class PutSpan:
    """The span `put` of a group that is on its way to Redis.

    Attributes:
        began_ns: Its beginning, in ns since 1970.
    """

    span: Span
    began_ns: int

    @property
    def trace(self) -> GroupTrace:
        """What the group brings to whoever takes it."""
        return GroupTrace(traceparent(self.span), self.began_ns)

    def end(self, seq: int | None) -> None:
        """End the span, unless it has ended; `seq` is the group's id, None if it is not stored."""
        if self.span.is_recording():
            self.span.set_attribute("redrb.stored", seq is not None)
            if seq is not None:
                self.span.set_attribute("redrb.id", seq)
            self.span.end()


@dataclass(slots=True)
class _Leased:
    """A leased group that is traced: its span before, and the one that goes on now."""

    parent: Context
    attributes: dict[str, str | int]
    span: Span
    used: bool = False


class LeaseTrace:
    """The spans of leased groups: `taken` until the batch is read, then `trained`."""

    def __init__(self, tracer: GroupTracer, leased: dict[int, _Leased]) -> None:
        self._tracer = tracer
        self._leased = leased

    def used(self) -> None:
        """Note that the groups were handed over to the training step."""
        for each in self._leased.values():
            if not each.used:
                each.span.end()
                each.span, each.used = self._tracer.begin_trained(each), True

    def end(self, outcome: str, ids: Collection[int]) -> None:
        """Note that groups were ended, such as by "ack" or "release"."""
        for seq in ids:
            each = self._leased.pop(seq, None)
            if each is not None:
                each.span.set_attribute("redrb.outcome", outcome)
                each.span.end()

    def parent_of(self, seq: int) -> str:
        """Return the span of a group as the next task gets it; "": it is not traced."""
        each = self._leased.get(seq)
        return "" if each is None else traceparent(each.span)


def traceparent(span: Span) -> str:
    """Return a span as W3C's header `traceparent` names it."""
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-01"


def _context(parent: str) -> Context | None:
    """Return the context of a span in another process; None if the text names none."""
    found = _TRACEPARENT.fullmatch(parent)
    if found is None:
        return None
    trace_id, span_id = (int(part, 16) for part in found.groups())
    context = SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(1))
    return set_span_in_context(NonRecordingSpan(context)) if context.is_valid else None
