"""A rollout as a `BufferItem`, and back, with every field of any type.

The fields by which the stream orders and expires a group are set too: `policy_version` is the
oldest model step, `token_versions` is the step of each token, and `action_mask` says if it counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from redrb.compat.xtuner.arrays import pack_column, unpack_column
from redrb.compat.xtuner.rollout_fields import (
    TOKEN_FIELDS,
    fields_of,
    is_agentic,
    mask_of,
    status_of,
    steps_of,
)
from redrb.compat.xtuner.values import pack_value, unpack_value
from redrb.errors import ConfigError, DecodeError, RecordError
from redrb.experience import BufferItem
from redrb.stream.take.rollout_reading import ROLLOUT

META = ROLLOUT
"""Name of the extra with the format; no rollout may have a field of this name."""

FORMAT = 1

_STEPS = "response_model_steps"


def pack_group(group: Sequence[Any], train_step: int | None) -> list[BufferItem]:
    """Return a group's rollouts as samples, or raise RecordError."""
    agentic = is_agentic(group)
    return [_pack(rollout, train_step, agentic=agentic) for rollout in group]


@dataclass(frozen=True, slots=True)
class StoredRollout:
    """The fields of a stored rollout.

    Attributes:
        train_step: Train step at which the staleness was written; None: it was not written.
    """

    state: dict[str, Any]
    train_step: int | None


def unpack_group(items: Iterable[BufferItem]) -> list[StoredRollout]:
    """Return the rollouts of a group that `pack_group` has packed."""
    return list(map(_unpack, items))


def _pack(rollout: Any, train_step: int | None, *, agentic: bool) -> BufferItem:
    state = rollout if isinstance(rollout, dict) else fields_of(rollout)
    steps, mask = steps_of(rollout), mask_of(rollout)
    # by these fields the stream orders and expires a rollout
    oldest = min(steps, default=None)
    item = BufferItem(None, None, status=status_of(rollout), policy_version=oldest)
    if steps:
        item.token_versions = torch.from_numpy(np.array(steps, dtype=np.int64))
        if agentic:  # no token counts for expiry
            item.action_mask = torch.zeros(len(steps), dtype=torch.bool)
        elif mask is not None:
            given = mask[: len(steps)]
            counts = np.array(given + [False] * (len(steps) - len(given)), dtype=np.bool_)
            item.action_mask = torch.from_numpy(counts)
    item.extras[META] = {"format": FORMAT, "train_step": train_step}
    for name, value in state.items():
        if not isinstance(name, str) or name == META:
            raise RecordError(
                f"a rollout has the field {name!r:.80}: fields are named by strings, and {META!r} "
                "is reserved."
            )
        column = pack_column(name, value) if name in TOKEN_FIELDS else None
        if column is None:
            item.extras[name] = pack_value(value, name)
        elif name != _STEPS or item.token_versions is None or type(value) is not list:
            item.tensors[column[0]] = column[1]  # a list of steps is in token_versions already
    return item


def _unpack(item: BufferItem) -> StoredRollout:
    meta = item.extras.get(META)
    form = meta.get("format") if isinstance(meta, dict) else None
    if not isinstance(meta, dict) or type(form) is not int or form < FORMAT:
        raise DecodeError(
            "it holds samples that are no rollouts of a ReplayBuffer: put them into another task."
        )
    if form > FORMAT:
        raise ConfigError(
            f"a group was put by a newer redrb, in format {form}, not {FORMAT}: upgrade redrb."
        )
    state: dict[str, Any] = {
        name: unpack_value(value) for name, value in item.extras.items() if name != META
    }
    for column, tensor in item.tensors.items():
        name, value = unpack_column(column, tensor)
        state[name] = value
    if item.token_versions is not None:
        state.setdefault(_STEPS, item.token_versions.tolist())
    step = meta.get("train_step")
    return StoredRollout(state, step if type(step) is int else None)
