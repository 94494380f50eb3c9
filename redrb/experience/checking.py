"""The checks of samples and batches before they are stored: types, shapes, lengths, rewards."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, index
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor

from redrb.errors import RecordError
from redrb.experience.padding import ACTION_FIELDS, SEQUENCE_FIELDS
from redrb.experience.records import BufferItem, Experience, batch_size

Where: TypeAlias = tuple[int, int] | None
"""Indices of group and sample, for the message; None for a batch."""

DIMENSIONS = {
    **dict.fromkeys((*SEQUENCE_FIELDS, *ACTION_FIELDS), (1,)),
    **dict.fromkeys(("values", "kl", "advantages"), (0, 1)),
    "reward": (0,),
}
"""Dimensions that a field of one sample may have."""

_INTEGERS = frozenset(
    (
        *(torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    )
)
_PLAN = [(name, dims, name in ACTION_FIELDS) for name, dims in DIMENSIONS.items()]
INTEGER_FIELDS = ("sequences", "token_versions")
_INTEGER_PLACES = [(name, list(DIMENSIONS).index(name)) for name in INTEGER_FIELDS]
_fields = attrgetter(*DIMENSIONS)


def check_groups(groups: Sequence[Sequence[Any]], first: int = 0) -> dict[int, RecordError]:
    """Refuse groups whose samples are malformed, and find the rewards that are not finite.

    One reward of nan makes all weights nan in one step. It is not refused here, because a filter
    may drop its group.

    Args:
        groups: The groups.
        first: Index of the first one in its put.

    Returns:
        The error to raise for each group with a reward that is nan or infinite, by the group's
        index; usually empty.

    Raises:
        RecordError: An element is no `BufferItem`, or a field has the wrong type, dtype, dimensions
            or length; the message names group, sample and field.
    """
    rewards = []
    for at, group in enumerate(groups, first):
        for place, item in enumerate(group):
            if not isinstance(item, BufferItem):
                raise RecordError(
                    f"group {at} holds a {type(item).__name__}: a group is a list of "
                    "redrb.BufferItem, and put_many takes a list of such lists.",
                    group=at,
                    sample=place,
                )
            version = item.policy_version
            if version is not None and (type(version) is not int or version < 0):
                _check_version(version, (at, place))
            _check_fields(_fields(item), 0, (at, place))
            if item.reward is not None:
                rewards.append(item.reward)
    return {} if all_finite(rewards) else _reward_errors(groups, first)


def check_batch(experience: Experience) -> dict[int, RecordError]:
    """Check a batch whose rows are one group each; returns and raises as `check_groups` does."""
    batch_size(experience)
    versions = experience.policy_version
    for version in (versions,) if versions is None or isinstance(versions, int) else versions:
        if version is not None and (type(version) is not int or version < 0):
            _check_version(version, None)
    _check_fields(_fields(experience), 1, None)
    rewards = experience.reward
    if rewards is None or all_finite([rewards]):
        return {}
    return {
        row: _reward_error(reward, f"row {row}", (row, 0))
        for row, reward in enumerate(rewards)
        if not all_finite([reward])
    }


@torch.no_grad()
def all_finite(rewards: Sequence[Tensor]) -> bool:
    """Return whether all elements of tensors of one shape are finite, usually in one call."""
    if not rewards:
        return True
    try:
        joined = rewards[0] if len(rewards) == 1 else torch.stack(list(rewards))
        return bool(joined.isfinite().all())
    except RuntimeError:  # several devices or dtypes, or a dtype without this kernel
        return all(bool(reward.double().isfinite().all()) for reward in rewards)


def _check_fields(fields: Sequence[object], lead: int, where: Where) -> None:
    """Refuse fields of a sample (`lead` 0) or a batch (`lead` 1) that are wrong or do not fit."""
    sequence = action = -1
    sequence_of = action_of = ""
    for (name, dims, of_actions), tensor in zip(_PLAN, fields, strict=True):
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            found = f"is a {type(tensor).__name__}, not a torch.Tensor"
            _refuse(name, f"{found}: convert it with torch.as_tensor()", where)
        shape = tensor.shape[lead:] if lead else tensor.shape
        if len(shape) not in dims:
            _refuse_shape(name, tuple(tensor.shape), lead, where)
        if not shape:
            continue
        length = shape[0]
        if of_actions:
            if action != length:
                if action >= 0:
                    _refuse_length(name, length, action_of, action, where)
                action, action_of = length, name
        elif sequence != length:
            if sequence >= 0:
                _refuse_length(name, length, sequence_of, sequence, where)
            sequence, sequence_of = length, name
    if action > sequence >= 0:
        _refuse(
            action_of,
            f"has length {action} and {sequence_of} {sequence}: the actions are the last tokens "
            "of the sequence, so there are no more of them than tokens",
            where,
        )
    for name, place in _INTEGER_PLACES:
        tensor = fields[place]
        if isinstance(tensor, Tensor) and tensor.dtype not in _INTEGERS:
            _refuse(name, f"is {tensor.dtype}, not of integers: convert it with .long()", where)


def _check_version(version: object, where: Where) -> None:
    """Refuse a version that is no int >= 0, of whichever integer type."""
    try:
        number = -1 if isinstance(version, bool) else index(version)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if number < 0:
        _refuse("policy_version", f"is {version!r:.80}: it is an int >= 0, or None", where)


def _refuse_length(name: str, length: int, first: str, expected: int, where: Where) -> NoReturn:
    _refuse(
        name,
        f"has length {length} and {first} {expected}: they describe the same tokens, so their "
        "lengths must be equal",
        where,
    )


def _refuse_shape(name: str, shape: tuple[int, ...], lead: int, where: Where) -> NoReturn:
    axis = {"reward": ""}.get(name, "S" if name in SEQUENCE_FIELDS else "A")
    batch = ["B"] if lead else []
    wanted = " or ".join(
        f"[{', '.join(batch + ([axis] if dims else []))}]" for dims in DIMENSIONS[name]
    )
    _refuse(
        name,
        f"has shape {list(shape)}, not {wanted}: reshape it, or put it into `tensors` under "
        "another name, where every shape is allowed",
        where,
    )


def _refuse(name: str, why: str, where: Where) -> NoReturn:
    if where is None:
        raise RecordError(f"{name} {why}.", field=name)
    group, sample = where
    raise RecordError(
        f"{name} {why} (sample {sample} in group {group}).",
        field=name,
        group=group,
        sample=sample,
    )


def _reward_errors(groups: Sequence[Sequence[BufferItem]], first: int) -> dict[int, RecordError]:
    """Return the error for the first bad reward of each group that has one."""
    found: dict[int, RecordError] = {}
    for at, group in enumerate(groups, first):
        for place, item in enumerate(group):
            if item.reward is not None and not all_finite([item.reward]):
                where = f"sample {place} in group {at}"
                found.setdefault(at, _reward_error(item.reward, where, (at, place)))
    return {at - first: error for at, error in found.items()}


def _reward_error(reward: Tensor, where: str, place: tuple[int, int]) -> RecordError:
    return RecordError(
        f"the reward of {where} is {reward.detach().item()}, and one such number spoils all "
        "weights",
        advice="score the sample again, or open the stream with "
        "filters=[redrb.finite_rewards()], which drops such groups.",
        field="reward",
        group=place[0],
        sample=place[1],
    )
