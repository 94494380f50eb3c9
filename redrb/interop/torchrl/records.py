"""Rows of TensorDicts as samples of a task, and back.

A key of a TensorDict is the name of a tensor of the sample; nested keys are joined by a point:
`("next", "reward")` is `next.reward`. Names of the standard fields, such as `sequences`, set these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from redrb.errors import RecordError
from redrb.experience import BufferItem, make_experience_batch
from redrb.experience.records import STANDARD_FIELDS, TENSOR_FIELDS, named_tensors

INDEX, VERSION = "index", "policy_version"
"""Entries of a batch: the id of each sample's group; its weight version, -1 if it is unknown."""


def samples_of(data: TensorDictBase) -> list[BufferItem]:
    """Return a sample for each row of a TensorDict, of its first dimension.

    The entry `policy_version` sets the samples' weight versions; `index` is left out.

    Raises:
        RecordError: `data` is no TensorDict with a batch dimension, a key has a point, or a value
            is no tensor.
    """
    if not isinstance(data, TensorDictBase):
        raise RecordError(f"a task takes TensorDicts, not {type(data).__name__}.")
    if not data.batch_dims or not len(data):
        raise RecordError(
            f"a TensorDict with batch_size={list(data.batch_size)} has no rows: use add() for one "
            "row, or unsqueeze(0)."
        )
    leaves = data.items(include_nested=True, leaves_only=True)
    columns = {_name(key): _checked(key, value) for key, value in leaves}
    columns.pop(INDEX, None)
    versions = columns.pop(VERSION, None)
    if not columns:
        raise RecordError("the TensorDict holds no tensor.")
    return [
        _sample(
            {name: column[row] for name, column in columns.items()},
            None if versions is None else int(versions[row].reshape(-1).min()),
        )
        for row in range(len(data))
    ]


def tensordict_of(items: Sequence[BufferItem], ids: Sequence[int]) -> TensorDict:
    """Return samples as one TensorDict with batch size `[B]`.

    Standard fields of several lengths are padded on the left, with masks; further tensors must have
    one shape each.

    Args:
        items: The samples.
        ids: Id of each sample's group, the entry `index`.

    Raises:
        RecordError: The samples have different fields, or further tensors of different shapes.
    """
    rows = [named_tensors(item) for item in items]
    names = rows[0].keys()
    if any(row.keys() != names for row in rows):
        raise RecordError("the samples of a batch have different fields.")
    uneven = [name for name in names if len({row[name].shape for row in rows}) > 1]
    ragged = [name for name in uneven if name not in TENSOR_FIELDS]
    if ragged:
        raise RecordError(
            f"{ragged[0]} has another shape in other samples of the batch: put tensors of one "
            "shape, or take the samples with ExperienceStream.take.",
            field=ragged[0],
        )
    columns = {name: torch.stack([row[name] for row in rows]) for name in names if not uneven}
    if uneven:
        columns = named_tensors(make_experience_batch(items))
    result = TensorDict({}, batch_size=[len(items)])
    for name, column in columns.items():
        result.set(_key(name), column)
    result.set(INDEX, torch.tensor(ids, dtype=torch.int64))
    versions = [-1 if item.policy_version is None else item.policy_version for item in items]
    result.set(VERSION, torch.tensor(versions, dtype=torch.int64))
    return result


def _name(key: str | tuple[str, ...]) -> str:
    parts = (key,) if isinstance(key, str) else key
    if any("." in part for part in parts):
        raise RecordError(
            f"the key {key!r} has a point, which joins nested keys in a task: rename it.",
            field=".".join(parts),
        )
    return ".".join(parts)


def _key(name: str) -> str | tuple[str, ...]:
    parts = tuple(name.split("."))
    return parts[0] if len(parts) == 1 else parts


def _checked(key: object, value: object) -> Tensor:
    if not isinstance(value, Tensor):
        raise RecordError(f"{key!r} is a {type(value).__name__}, not a tensor.")
    return value.detach()


def _sample(row: dict[str, Tensor], version: int | None) -> BufferItem:
    standard: dict[str, Any] = dict.fromkeys(STANDARD_FIELDS)
    standard |= {name: row.pop(name) for name in TENSOR_FIELDS if name in row}
    known = version if version is not None and version >= 0 else None
    return BufferItem(**standard, tensors=row, policy_version=known)
