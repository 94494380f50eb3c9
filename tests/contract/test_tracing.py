"""The way of a traced group is one trace, from its put over two tasks to its training."""

from __future__ import annotations

import time

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from redrb import ConfigError, ExperienceStream
from redrb.codec import encode_groups, parse_group
from redrb.codec.metadata import GroupTrace, trace_of, with_trace
from redrb.experience import Status
from redrb.stream import tracing
from tests.samples import numbered

TRACE = GroupTrace(f"00-{1:032x}-{2:016x}-01", 1_795_000_000_000_000_000)


@pytest.fixture
def exporter():
    """Traces every group."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing.enable(1.0, tracer_provider=provider)
    yield exporter
    tracing.disable()
    provider.shutdown()


def names(spans: list[ReadableSpan], task: str) -> list[str]:
    return [
        span.name.removeprefix("redrb ")
        for span in spans
        if span.attributes is not None and span.attributes["redrb.task"] == task
    ]


def test_a_group_has_one_trace_over_two_tasks(client, namespace, exporter):
    with (
        ExperienceStream(
            client,
            "made",
            namespace=namespace,
            order="admission",
            max_staleness=2,
            groups_per_version=4,
        ) as made,
        ExperienceStream(client, "scored", namespace=namespace) as scored,
    ):
        made.advance(1)
        with made.admit(1, timeout=5) as right:
            [first] = made.put(numbered(1, policy_version=1), admission=right)
        with made.take(1, timeout=5) as lease:
            lease.forward(scored, lease.groups())
        scored.take(1, timeout=5).release()
        lease = scored.take(1, timeout=5)
        lease.batch()
        lease.ack()
    spans = list(exporter.get_finished_spans())
    assert len({span.context.trace_id for span in spans if span.context}) == 1
    assert names(spans, "made") == ["made", "put", "waiting", "taken", "trained"]
    assert names(spans, "scored") == [
        *("put", "waiting", "taken"),  # released
        *("waiting", "taken", "trained"),
    ]
    by_id = {span.context.span_id: span for span in spans if span.context}
    roots = [span.name for span in spans if span.parent is None]
    assert roots == ["redrb made"]
    assert all(span.parent.span_id in by_id for span in spans if span.parent)
    parents = {
        f"{span.attributes['redrb.task']} {span.name}": by_id[span.parent.span_id].name
        for span in spans
        if span.parent and span.attributes
    }
    assert parents["made redrb put"] == "redrb made"
    assert parents["scored redrb put"] == "redrb trained"
    assert parents["scored redrb trained"] == "redrb put"
    outcomes = [
        (span.name, span.attributes["redrb.outcome"])
        for span in spans
        if span.attributes and "redrb.outcome" in span.attributes
    ]
    assert outcomes == [
        ("redrb trained", "ack"),
        ("redrb taken", "release"),
        ("redrb trained", "ack"),
    ]
    stored = next(span for span in spans if span.name == "redrb put")
    assert stored.attributes["redrb.id"] == first
    assert all(span.start_time <= span.end_time for span in spans)


def test_a_group_in_parts_is_traced_from_its_first_part(client, namespace, exporter):
    with ExperienceStream(client, "math", namespace=namespace) as stream:
        stream.put_part("a", numbered(1), index=0, of=2)
        assert not exporter.get_finished_spans()
        began_ns = time.time_ns()
        seq = stream.put_part("a", numbered(2), index=1, of=2)
        stream.take(1, timeout=5).ack()
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert names(list(spans.values()), "math") == ["made", "put", "waiting", "taken"]
    made, put = spans["redrb made"], spans["redrb put"]
    assert made.start_time is not None
    assert made.start_time <= began_ns  # the server's clock counts whole ms, rounded down
    assert put.attributes["redrb.id"] == seq
    assert {span.context.trace_id for span in spans.values() if span.context} == {
        made.context.trace_id
    }


@pytest.mark.parametrize("url", ["fake"], indirect=True)
def test_only_the_share_of_groups_is_traced(client, namespace, exporter):
    with ExperienceStream(client, "math", namespace=namespace) as stream:
        tracing.enable(0.0)
        stream.put(numbered(1))
        [layout] = stream.take(1, timeout=5).layouts.values()
        tracing.disable()
        stream.put(numbered(1))
        [plain] = stream.take(1, timeout=5).layouts.values()
    assert bytes(layout.blob) == bytes(plain.blob)
    assert trace_of(plain) is None
    assert exporter.get_finished_spans() == ()
    for wrong in (-0.1, 1.1):
        with pytest.raises(ConfigError, match="from 0 to 1"):
            tracing.enable(wrong)


@pytest.mark.parametrize("url", ["fake"], indirect=True)
def test_a_put_that_is_not_stored_ends_its_span(client, namespace, exporter):
    with ExperienceStream(client, "math", namespace=namespace, limit=1, on_full="error") as stream:
        stream.put(numbered(1))
        with pytest.raises(Exception, match="full"):
            stream.put(numbered(1))
    stored = [span.attributes["redrb.stored"] for span in exporter.get_finished_spans()
              if span.attributes]  # fmt: skip
    assert stored == [True, False]


def test_a_trace_changes_nothing_else_of_a_group():
    for item in (
        numbered(1),
        numbered(1, policy_version=7),
        numbered(1, policy_version=7, status=Status.ABORTED, group_id="g", tags={"a": 1}),
        numbered(1, extras={"text": "x" * 99}),
    ):
        [encoded] = encode_groups([[item, item]])
        layout, before = (
            parse_group(with_trace(encoded.blob, TRACE)),
            parse_group(encoded.blob),
        )
        assert trace_of(layout) == TRACE
        assert trace_of(before) is None
        for name in ("policy_versions", "statuses", "group_id", "tags", "extras", "samples"):
            assert getattr(layout, name) == getattr(before, name)
        assert 60 < layout.nbytes - before.nbytes < 80


def test_a_damaged_trace_is_none():
    [encoded] = encode_groups([[numbered(1)]])
    for trace in (("x", -1), (1, 1), ("x", 1 << 63), ("x", 1.5)):
        layout = parse_group(with_trace(encoded.blob, GroupTrace(*trace)))
        assert trace_of(layout) is None
    for text in ("", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "x" * 55):
        tracing.enable(1.0)
        tracer = tracing.active()
        tracing.disable()
        assert tracer.taken("t", "g", [(1, GroupTrace(text, 1))]) is None
