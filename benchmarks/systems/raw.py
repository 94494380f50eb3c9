"""The raw floor: an entry a sample, a field a tensor, and nobody pads or decodes."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.shapes import Shape
from benchmarks.systems.floor import Entry, add_all, read_all, version
from benchmarks.systems.job import Job
from redrb.experience.records import named_tensors

__all__ = ["consume", "produce", "version"]


def produce(job: Job) -> None:
    """Add the bytes of each tensor, read from the tensors as they are put."""
    shape = job.shape
    samples = job.groups * shape.group_samples
    add_all(job, samples, entries_of(shape), pipelined=shape.put_samples)


def consume(job: Job) -> None:
    """Read as many samples as a batch has."""
    shape = job.shape
    read_all(job, job.groups * shape.group_samples, batch=shape.take_samples)


def entries_of(shape: Shape) -> Callable[[int], Entry]:
    """Return a function that makes the entry of a sample from its number."""
    items = [item for group in shape.items(shape.distinct_groups) for item in group]

    def entry(number: int) -> Entry:
        tensors = named_tensors(items[number % len(items)])
        return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}

    return entry
