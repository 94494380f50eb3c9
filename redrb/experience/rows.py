"""Some samples of a batch, as another batch with the same padding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from torch import Tensor

from redrb.experience.batching import METADATA
from redrb.experience.records import (
    TENSOR_FIELDS,
    BufferItem,
    Experience,
    batch_size,
    per_sample,
)

R = TypeVar("R", BufferItem, Experience)


def select_rows(
    experience: Experience, rows: Sequence[int], choose: Callable[[Tensor], Tensor] | None = None
) -> Experience:
    """Return some samples of a batch."""
    index = list(rows)
    size = batch_size(experience)
    chosen = with_tensors(experience, choose or (lambda tensor: tensor[index]))
    chosen.group_index = None
    for name in METADATA:
        values = per_sample(experience, name, size)
        setattr(chosen, name, [values[row] for row in rows])
    return chosen


def with_tensors(record: R, change: Callable[[Tensor], Tensor]) -> R:
    """Return a record with changed tensors, and copies of its containers of metadata."""
    fields: dict[str, Any] = {
        name: None if (tensor := getattr(record, name)) is None else change(tensor)
        for name in TENSOR_FIELDS
    }
    fields["tensors"] = {name: change(tensor) for name, tensor in record.tensors.items()}
    for name in METADATA:
        value = getattr(record, name)
        if isinstance(value, Mapping):
            fields[name] = dict(value)
        elif isinstance(value, list):
            fields[name] = list(value)
    return replace(record, **fields)
