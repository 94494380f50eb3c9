"""The checks of samples and batches before they are stored: types, shapes, lengths, rewards."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, index
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor

from redrb.errors import RecordError
from redrb.experience.padding import ACTION_FIELDS, SEQUENCE_FIELDS
from redrb.experience.records import BufferItem

Where: TypeAlias = tuple[int, int]
"""Indices of group and sample, for the message."""

DIMENSIONS = {
    **dict.fromkeys((*SEQUENCE_FIELDS, *ACTION_FIELDS), (1,)),
    **dict.fromkeys(("values", "kl", "advantages"), (0, 1)),
    "reward": (0,),
}
"""Dimensions that a field of one sample may have."""

_INTEGERS = frozenset(
    (
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
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

    Returns:
        The error to raise for each group with a reward that is nan or infinite, by the group's
        index; usually empty.
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
            _check_fields(_fields(item), (at, place))
            if item.reward is not None:
                rewards.append(item.reward)
    found: dict[int, RecordError] = {}
    if all_finite(rewards):
        return found
    for number, group in enumerate(groups):
        for place, item in enumerate(group):
            if item.reward is not None and not all_finite([item.reward]):
                found.setdefault(number, _reward_error(item.reward, (first + number, place)))
    return found


@torch.no_grad()
def all_finite(rewards: Sequence[Tensor]) -> bool:
    """Return whether all elements of tensors of one shape are finite, usually in one call.

    Raises:
        RecordError: A tensor has no numbers that can be read.
    """
    if not rewards:
        return True
    try:
        joined = rewards[0] if len(rewards) == 1 else torch.stack(list(rewards))
        return bool(joined.isfinite().all())
    except (RuntimeError, TypeError):  # several devices or dtypes, or a dtype without this kernel
        return all(map(_is_finite, rewards))


def _is_finite(reward: Tensor) -> bool:
    try:
        return bool(reward.double().isfinite().all())
    except (RuntimeError, TypeError) as error:
        raise RecordError(
            f"a reward is a {type(reward).__name__} of {reward.dtype}, {reward.layout} on "
            f"{reward.device}, which has no numbers that can be read: {error}",
            field="reward",
        ) from error


def _check_fields(fields: Sequence[object], where: Where) -> None:
    """Refuse fields of a sample that are wrong or do not fit each other."""
    sequence = action = -1
    sequence_of = action_of = ""
    for (name, dims, of_actions), tensor in zip(_PLAN, fields, strict=True):
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            found = f"is a {type(tensor).__name__}, not a torch.Tensor"
            _refuse(name, f"{found}: convert it with torch.as_tensor()", where)
        if tensor.is_nested:
            _refuse(name, "is a nested tensor: unbind it, and give each sample its part", where)
        try:
            shape = tensor.shape
        except RuntimeError as error:  # of a parameter that has no memory yet
            _refuse(name, f"has no shape: {error}", where)
        if len(shape) not in dims:
            axis = "S" if name in SEQUENCE_FIELDS else "A"
            wanted = " or ".join(f"[{axis}]" if each else "[]" for each in dims)
            found = f"has shape {list(shape)}, not {wanted}: reshape it, or put it into `tensors`"
            _refuse(name, f"{found} under another name, where every shape is allowed", where)
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


def _refuse(name: str, why: str, where: Where) -> NoReturn:
    group, sample = where
    raise RecordError(
        f"{name} {why} (sample {sample} in group {group}).",
        field=name,
        group=group,
        sample=sample,
    )


def _reward_error(reward: Tensor, where: Where) -> RecordError:
    group, sample = where
    return RecordError(
        f"the reward of sample {sample} in group {group} is {reward.detach().item()}, and one such "
        "number spoils all weights",
        advice="score the sample again, or open the stream with "
        "filters=[redrb.finite_rewards()], which drops such groups.",
        field="reward",
        group=group,
        sample=sample,
    )
