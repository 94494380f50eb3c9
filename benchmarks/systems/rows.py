"""The samples of a round as the other systems take them: a dictionary of tensors a sample."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    """Return a client that lets a command block as long as any side may wait."""
    return redis.Redis.from_url(job.url, socket_timeout=2 * TIMEOUT_S)


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


def check_full(job: Job, batch: Row) -> None:
    """Raise unless a batch has all samples of a take."""
    wanted = job.shape.take_groups * job.shape.group_samples
    if any(len(tensor) != wanted for tensor in batch.values()):
        raise RuntimeError(f"a batch has not {wanted} samples")
