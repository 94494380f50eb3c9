"""A rollout as a `BufferItem`, and back, with every field of any type.

The fields by which the stream orders and expires a group are set too: `policy_version` is the
oldest model step, `token_versions` is the step of each token, and `action_mask` says if it counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from redrb.compat.xtuner.arrays import pack_column, unpack_column
from redrb.compat.xtuner.rollout_fields import (
    TOKEN_FIELDS,
    counted_tokens,
    fields_of,
    is_agentic,
    status_of,
    steps_of,
)
from redrb.compat.xtuner.staleness import group_status
from redrb.compat.xtuner.values import pack_value, unpack_value
from redrb.errors import ConfigError, DecodeError, RecordError
from redrb.experience import BufferItem, Status
from redrb.stream.take.rollout_reading import ROLLOUT

META = ROLLOUT
"""Name of the extra with the format; no rollout may have a field of this name."""

FORMAT = 1

_STEPS = "response_model_steps"

EXPIRED, STEPLESS = -(2**40), -(2**30)
"""In place of a rollout's steps: each refresh expires its group; each with a token threshold."""


def pack_group(group: Sequence[Any]) -> list[BufferItem]:
    """Return a group's rollouts as samples, or raise RecordError."""
    agentic, aborted = is_agentic(group), group_status(group) is Status.ABORTED
    return [_pack(rollout, agentic=agentic, aborted=aborted) for rollout in group]


def unpack_group(items: Iterable[BufferItem]) -> list[dict[str, Any]]:
    """Return the rollouts of a group that `pack_group` has packed, as dicts of their fields."""
    return list(map(_unpack, items))


def _pack(rollout: Any, *, agentic: bool, aborted: bool) -> BufferItem:
    state = rollout if isinstance(rollout, dict) else fields_of(rollout)
    steps, counts = steps_of(rollout), counted_tokens(rollout)
    # by these fields the stream orders and expires a rollout
    oldest = min(steps, default=None)
    item = BufferItem(None, None, status=status_of(rollout), policy_version=oldest)
    versions = steps
    if aborted and item.status is Status.EXPIRED:
        versions, counts = [EXPIRED], [True]
    elif agentic or counts is None:  # no token counts for expiry
        counts = [False] * len(steps)
    elif not any(counts):  # those that count have no step
        versions, counts = [STEPLESS], [True]
    if versions:
        item.token_versions = torch.from_numpy(np.array(versions, dtype=np.int64))
        if not all(counts):
            item.action_mask = torch.from_numpy(np.array(counts, dtype=np.bool_))
    item.extras[META] = {"format": FORMAT}
    for name, value in state.items():
        if not isinstance(name, str) or name == META:
            raise RecordError(
                f"a rollout has the field {name!r:.80}: fields are named by strings, and {META!r} "
                "is reserved."
            )
        column = pack_column(name, value) if name in TOKEN_FIELDS else None
        if column is None:
            item.extras[name] = pack_value(value, name)
        elif name != _STEPS or versions is not steps or type(value) is not list or not steps:
            item.tensors[column[0]] = column[1]  # a list of steps is in token_versions already
    return item


def _unpack(item: BufferItem) -> dict[str, Any]:
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
    versions = [] if item.token_versions is None else item.token_versions.tolist()
    if versions not in ([], [EXPIRED], [STEPLESS]):
        state.setdefault(_STEPS, versions)
    return state
