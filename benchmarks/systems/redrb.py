"""redrb: `stream.writer()` puts, `stream.leases()` takes padded batches."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

import redrb
from benchmarks.shapes import Shape
from benchmarks.systems.job import TIMEOUT_S, Job
from redrb.codec.kernels import NAME

VERSIONS = 8
"""Newest weight version of the samples, which a task with a rule of staleness learns."""

Put = list[list[redrb.BufferItem]]


def produce(job: Job) -> None:
    """Put all groups, pipelined unless the shape is one sample at a time."""
    prioritized = job.settings.get("order") == "prioritized"
    puts = puts_of(job.shape, tagged="tags" in job.settings)
    with ExitStack() as scope:
        client = scope.enter_context(redrb.connect(job.url))
        streams = _streams(job, client, scope)
        writers = [scope.enter_context(stream.writer()) for stream in streams]
        targets = streams if job.shape.one_at_a_time else writers
        first = scope.enter_context(redrb.ExperienceStream(client, f"{job.key}-first"))
        first.put_many(puts[0])  # connects, and sends the server its scripts
        job.start()
        for number in range(job.groups // job.shape.put_groups):
            priority = 1.0 + number % 7 if prioritized else None
            targets[number % job.tasks].put_many(puts[number % len(puts)], priority=priority)
        for writer in writers:
            writer.flush()
        job.finish()


def consume(job: Job) -> None:
    """Take all groups as padded batches; each is acknowledged when the next one is asked for."""
    shape = job.shape
    with ExitStack() as scope:
        client = scope.enter_context(redrb.connect(job.url))
        streams = _streams(job, client, scope)
        for stream in streams:
            stream.join_group()
        job.start()
        loops = [stream.leases(shape.take_groups, timeout=TIMEOUT_S) for stream in streams]
        last: dict[int, redrb.Lease] = {}
        for number in range(job.groups // shape.take_groups):
            task = number % job.tasks
            last[task] = next(loops[task])
            if len(last[task].batch()) != shape.take_samples:
                raise SystemExit("a batch is not full")
        for lease in last.values():
            lease.ack()
        job.finish()
        for loop in loops:
            loop.close()


def version() -> str:
    """Name redrb's version and the codec's kernel."""
    return f"redrb {redrb.__version__}, {NAME} codec"


def puts_of(shape: Shape, *, tagged: bool = False) -> list[Put]:
    """Return the distinct puts of a producer, two tags with each sample if wanted."""
    groups = shape.items(shape.distinct_groups)
    if tagged:
        groups = [
            [replace(item, tags={"score": index % 10 / 10, "source": "math"}) for item in group]
            for index, group in enumerate(groups)
        ]
    return [
        groups[start : start + shape.put_groups]
        for start in range(0, len(groups), shape.put_groups)
    ]


def _streams(job: Job, client: redrb.Client, scope: ExitStack) -> list[redrb.ExperienceStream]:
    """Open a stream for each task."""
    streams = [
        scope.enter_context(redrb.ExperienceStream(client, f"{job.key}-{task}", **job.settings))
        for task in range(job.tasks)
    ]
    if "max_staleness" in job.settings:
        for stream in streams:
            stream.advance(VERSIONS)
    return streams
