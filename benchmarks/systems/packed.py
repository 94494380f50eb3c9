"""The packed floor: redrb's bytes, made beforehand, an entry a group: the codec costs nothing."""

from __future__ import annotations

from benchmarks.systems.floor import add_all, read_all, version
from benchmarks.systems.job import Job
from redrb.codec import encode_groups

__all__ = ["consume", "produce", "version"]


def produce(job: Job) -> None:
    """Add groups that were encoded before the clock started."""
    shape = job.shape
    encoded = encode_groups(shape.items(shape.distinct_groups))
    entries = [{"g": bytes(group.blob)} for group in encoded]
    add_all(
        job, job.groups, lambda number: entries[number % len(entries)], pipelined=shape.put_groups
    )


def consume(job: Job) -> None:
    """Read as many groups as a batch has."""
    read_all(job, job.groups, batch=job.shape.take_groups)
