"""The samples of a group as `BufferItem`s, field by field, and back; nothing is pickled."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from redrb.compat.xtuner.arrays import pack_column, unpack_column
from redrb.compat.xtuner.values import MAX_DEPTH, pack_value, unpack_value
from redrb.errors import DecodeError, RecordError
from redrb.experience import BufferItem

FORMAT = 1

_PLAIN = {str, int, float, bool, bytes, type(None)}
_CONTAINERS = (list, tuple, set, frozenset, dict)
_ARRAYS = (np.ndarray, np.generic, Tensor)


def samples_in(group: Sequence[Any]) -> Iterator[Any]:
    """Yield the samples of a group, of which a trajectory may be a list of several samples."""
    for trajectory in group:
        if isinstance(trajectory, list):
            yield from trajectory
        else:
            yield trajectory


def group_index(group: Sequence[Any]) -> int | None:
    """Return the number of a group; None if it has none."""
    first = next(samples_in(group), None)
    if isinstance(first, Mapping):
        return first.get("group_index")
    return getattr(first, "group_index", None)


def pack_group(group: Sequence[Any], prompts: Sequence[Any] = ()) -> list[BufferItem]:
    """Return samples, objects of `Sample` or dicts of their fields, as they are stored.

    Lists of numbers and arrays are columns; other fields are extras.

    Args:
        group: Samples, or lists of the samples of one trajectory.
        prompts: The samples from which the group was made, where these are other ones.

    Raises:
        RecordError: A field cannot be stored, or there is no sample.
    """
    items = []
    for place, trajectory in enumerate(group):
        if isinstance(trajectory, list):
            items += [_pack(sample, trajectory=place, listed=True) for sample in trajectory]
        else:
            items.append(_pack(trajectory, trajectory=place))
    if not items:
        raise RecordError("a group holds no sample: give lists of at least one Sample.")
    return items + [_pack(sample, prompt=True) for sample in prompts]


def unpack_group(items: Sequence[BufferItem], sample_class: Any) -> tuple[list[Any], list[Any]]:
    """Return the group and prompts of `pack_group`; raises DecodeError for other items."""
    group: dict[int, Any] = {}
    prompts = []
    for item in items:
        extras = item.extras
        stored, place = extras.get("sample"), extras.get("trajectory", 0)
        if extras.get("format") != FORMAT or not isinstance(stored, dict) or type(place) is not int:
            raise DecodeError(
                f"it holds no samples in format {FORMAT}: put groups into this task with "
                "redrb.compat.slime or redrb.compat.miles of the same redrb, and others into "
                "another task."
            )
        fields = {name: unpack_value(value) for name, value in stored.items()}
        fields |= dict(unpack_column(name, tensor) for name, tensor in item.tensors.items())
        sample = sample_class.from_dict(fields)
        if extras.get("prompt"):
            prompts.append(sample)
        elif extras.get("listed"):
            group.setdefault(place, []).append(sample)
        else:
            group[place] = sample
    return [group[place] for place in sorted(group)], prompts


def forget_numbers(items: Sequence[BufferItem]) -> list[BufferItem]:
    """Forget the numbers of a group, which groups of other makers may have as well."""
    for item in items:
        item.extras["sample"] |= {"group_index": None, "index": None}
    return list(items)


def number(group: Sequence[Any], new: int) -> None:
    """Give numbers to a group that has none."""
    for place, trajectory in enumerate(group):
        for sample in samples_in([trajectory]):
            if sample.group_index is None:
                sample.group_index, sample.index = new, new * len(group) + place
                sample.rollout_id = sample.index if isinstance(trajectory, list) else None


def check_size(group: Sequence[Any], size: int) -> None:
    """Raise RecordError if a group has another number of trajectories."""
    if len(group) != size:
        raise RecordError(
            f"a group of {len(group)} trajectories for n_samples_per_prompt={size}: let the makers "
            f"put groups of {size}."
        )


def _pack(sample: Any, **place: Any) -> BufferItem:
    fields = sample if isinstance(sample, Mapping) else sample.to_dict()
    item = BufferItem(None, None)
    stored: dict[str, Any] = {}
    for name, value in fields.items():
        column = None if ":" in name else pack_column(name, value)
        if column is not None:
            item.tensors[column[0]] = column[1]
        else:
            _check(value, name)
            stored[name] = pack_value(value, name)
    item.extras = {"format": FORMAT, **place, "sample": stored}
    reward = fields.get("reward")
    if isinstance(reward, int | float) and math.isfinite(reward):
        item.reward = torch.tensor(float(reward))  # for those who look at the task
    versions = [int(each) for each in fields.get("weight_versions") or () if str(each).isdigit()]
    item.policy_version = min(versions, default=None)
    return item


def _check(value: Any, name: str, depth: int = 0) -> None:
    """Refuse values that could not be returned as they were."""
    kind = type(value)
    if kind in _PLAIN or depth > MAX_DEPTH:  # `pack_value` refuses what is nested deeper
        return
    if kind in _CONTAINERS:
        if not set(map(type, value)) <= _PLAIN or kind is dict:
            for each in (*value, *value.values()) if kind is dict else value:
                _check(each, name, depth + 1)
    elif not isinstance(value, _ARRAYS) or kind.__module__ not in ("numpy", "torch"):
        raise RecordError(
            f"the field {name!r} of a Sample holds a {kind.__module__}.{kind.__qualname__}, which "
            "cannot be stored: use numbers, text, bytes, lists, dicts, arrays and tensors, or set "
            "the field to None where the trainer does not need it.",
            field=name,
        )
