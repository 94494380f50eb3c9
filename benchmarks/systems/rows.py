"""The samples of a round as the other systems take them: a dictionary of tensors a sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import redis
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from benchmarks.shapes import Shape
from benchmarks.systems.job import TIMEOUT_S, Job
from redrb.experience.records import named_tensors

Row = dict[str, Tensor]
Form = TypeVar("Form")


def connected(job: Job) -> redis.Redis:
    """Return a connected client that lets a command block as long as any side may wait."""
    client = redis.Redis.from_url(job.url, socket_timeout=2 * TIMEOUT_S)
    client.ping()
    return client


def distinct_groups(shape: Shape) -> list[list[Row]]:
    """Return the distinct groups of a shape."""
    groups = shape.items(shape.distinct_groups)
    return [[named_tensors(item) for item in group] for group in groups]


def distinct_puts(shape: Shape) -> list[list[Row]]:
    """Return the samples of each distinct put, the groups one after the other."""
    groups = distinct_groups(shape)
    return [
        [row for group in groups[start : start + shape.put_groups] for row in group]
        for start in range(0, len(groups), shape.put_groups)
    ]


def repeated(forms: Sequence[Form], count: int) -> Iterator[Form]:
    """Yield `count` of the prepared forms, from the first again after the last."""
    for number in range(count):
        yield forms[number % len(forms)]


def padded(rows: Sequence[Row]) -> Row:
    """Stack samples to a batch, padded on the left with zeros as redrb's batches are."""
    return {name: _column([row[name] for row in rows]) for name in rows[0]}


def _column(tensors: list[Tensor]) -> Tensor:
    if all(tensor.shape == tensors[0].shape for tensor in tensors):
        return torch.stack(tensors)
    return pad_sequence(tensors, batch_first=True, padding_side="left")


def check_full(batch: Row, samples: int) -> None:
    """Raise unless a batch has so many samples."""
    if any(len(tensor) != samples for tensor in batch.values()):
        raise RuntimeError(f"a batch has not {samples} samples")


def consume_groups(job: Job, next_group: Callable[[], list[Row]]) -> None:
    """Read group after group, and pad each batch: the measured part of a consumer."""
    job.start()
    for _ in range(0, job.groups, job.shape.take_groups):
        batch = [row for _ in range(job.shape.take_groups) for row in next_group()]
        check_full(padded(batch), job.shape.take_samples)
    job.finish()
