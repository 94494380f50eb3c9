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
    """Return a sample for each row of a TensorDict, of its first dimension, or raise RecordError.

    The entry `policy_version` sets the samples' weight versions; `index` is left out.
    """
    if not isinstance(data, TensorDictBase):
        raise RecordError(f"a task takes TensorDicts, not {type(data).__name__}.")
    if not data.batch_dims or not len(data):
        raise RecordError(
            f"a TensorDict with batch_size={list(data.batch_size)} has no rows: use add() for one "
            "row, or unsqueeze(0)."
        )
    leaves = data.items(include_nested=True, leaves_only=True)
    columns: dict[str, Tensor] = {}
    for key, value in leaves:
        parts = (key,) if isinstance(key, str) else key
        name = ".".join(parts)
        if any("." in part for part in parts):
            raise RecordError(
                f"the key {key!r} has a point, which joins nested keys in a task: rename it.",
                field=name,
            )
        if not isinstance(value, Tensor):
            raise RecordError(f"{key!r} is a {type(value).__name__}, not a tensor.")
        columns[name] = value.detach()
    columns.pop(INDEX, None)
    versions = columns.pop(VERSION, None)
    if not columns:
        raise RecordError("the TensorDict holds no tensor.")
    samples = []
    for row in range(len(data)):
        tensors = {name: column[row] for name, column in columns.items()}
        standard: dict[str, Any] = dict.fromkeys(STANDARD_FIELDS)
        standard |= {name: tensors.pop(name) for name in TENSOR_FIELDS if name in tensors}
        version = -1 if versions is None else int(versions[row].reshape(-1).min())
        known = version if version >= 0 else None
        samples.append(BufferItem(**standard, tensors=tensors, policy_version=known))
    return samples


def tensordict_of(items: Sequence[BufferItem], ids: Sequence[int]) -> TensorDict:
    """Return samples as one TensorDict with batch size `[B]`, or raise RecordError.

    Standard fields of several lengths are padded on the left. With `sequences` or
    `action_log_probs` the batch has their masks. Further tensors must have one shape each.
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
    if uneven or not names.isdisjoint(("sequences", "action_log_probs")):
        columns = named_tensors(make_experience_batch(items))
    else:
        columns = {name: torch.stack([row[name] for row in rows]) for name in names}
    result = TensorDict({}, batch_size=[len(items)])
    for name, column in columns.items():
        parts = tuple(name.split("."))
        result.set(parts[0] if len(parts) == 1 else parts, column)
    result.set(INDEX, torch.tensor(ids, dtype=torch.int64))
    versions = [-1 if item.policy_version is None else item.policy_version for item in items]
    result.set(VERSION, torch.tensor(versions, dtype=torch.int64))
    return result
