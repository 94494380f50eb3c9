"""What a sample must be to be stored: what would crash or poison a training step is refused."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, index
from typing import NoReturn, TypeAlias

import torch
from torch import Tensor

from redrb.errors import RecordError
from redrb.experience.padding import ACTION_FIELDS, SEQUENCE_FIELDS
from redrb.experience.records import BufferItem, Experience, batch_size

Where: TypeAlias = tuple[int, int] | None
"""Group and sample that a message names; None: rows of a batch."""

_DIMS = {
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
_PLAN = [(name, dims, name in ACTION_FIELDS) for name, dims in _DIMS.items()]
_INTEGER_FIELDS = [(name, list(_DIMS).index(name)) for name in ("sequences", "token_versions")]
_fields = attrgetter(*_DIMS)


def check_sample(item: object, where: tuple[int, int] = (0, 0)) -> None:
    """Refuse what is no sample, or one whose fields are wrong or do not fit each other.

    Args:
        item: What should be a `BufferItem`.
        where: Its group's place in the put and its own in the group, for the message.

    Raises:
        RecordError: A field has the wrong type, dtype, dimensions or length; the message names it.
    """
    if not isinstance(item, BufferItem):
        raise RecordError(
            f"group {where[0]} holds a {type(item).__name__}: a group is a list of "
            "redrb.BufferItem, and put_many takes a list of such lists."
        )
    version = item.policy_version
    if version is not None and (type(version) is not int or version < 0):
        _check_version(version, where)
    _check(_fields(item), 0, where)


def check_rows(experience: Experience) -> None:
    """Refuse a batch whose rows are no sound samples; see `check_sample`.

    Raises:
        RecordError: A field is wrong, or fields do not fit each other.
    """
    batch_size(experience)
    versions = experience.policy_version
    if isinstance(versions, int):
        _check_version(versions, None)
    elif versions is not None:
        for version in versions:
            _check_version(version, None)
    _check(_fields(experience), 1, None)


def check_rewards(groups: Sequence[Sequence[BufferItem]], places: Sequence[int]) -> None:
    """Refuse rewards that are no finite numbers: one nan makes all weights nan in one step.

    Args:
        groups: The samples.
        places: Place of each group in the put, for the message.

    Raises:
        RecordError: One is nan or infinite; the message names the sample.
    """
    found = [item.reward for group in groups for item in group if item.reward is not None]
    if _all_finite(found):
        return
    for at, group in zip(places, groups, strict=True):
        for place, item in enumerate(group):
            if item.reward is not None and not _all_finite([item.reward]):
                _refuse_reward(item.reward, f"sample {place} in group {at}")


def check_row_rewards(rewards: Tensor | None) -> None:
    """Refuse rewards `[B]` of a batch that are no finite numbers; raises as `check_rewards`."""
    if rewards is None or _all_finite([rewards]):
        return
    for row, reward in enumerate(rewards):
        if not _all_finite([reward]):
            _refuse_reward(reward, f"row {row}")


@torch.no_grad()
def _all_finite(rewards: Sequence[Tensor]) -> bool:
    """Return whether tensors of one shape hold finite numbers alone, looking at all at once."""
    if not rewards:
        return True
    try:
        joined = rewards[0] if len(rewards) == 1 else torch.stack(list(rewards))
        return bool(joined.isfinite().all())
    except RuntimeError:  # of several devices or dtypes, or of a dtype that has no such kernel
        return all(bool(reward.double().isfinite().all()) for reward in rewards)


def _check(fields: Sequence[object], lead: int, where: Where) -> None:
    """Check the fields of a sample, or those of a batch, which have `lead` dimensions more."""
    sequence = action = -1
    sequence_of = action_of = ""
    for (name, dims, of_actions), tensor in zip(_PLAN, fields, strict=True):
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            _refuse_type(name, tensor, where)
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
    for name, place in _INTEGER_FIELDS:
        tensor = fields[place]
        if isinstance(tensor, Tensor) and tensor.dtype not in _INTEGERS:
            _refuse(name, f"is {tensor.dtype}, not of integers: convert it with .long()", where)


def _check_version(version: object, where: Where) -> None:
    if version is None or (type(version) is int and version >= 0):
        return
    try:
        number = -1 if isinstance(version, bool) else index(version)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if number < 0:
        _refuse("policy_version", f"is {version!r:.80}: it is an int >= 0, or None", where)


def _refuse_type(name: str, value: object, where: Where) -> NoReturn:
    _refuse(
        name,
        f"is a {type(value).__name__}, not a torch.Tensor: convert it with torch.as_tensor()",
        where,
    )


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
    wanted = " or ".join(f"[{', '.join(batch + ([axis] if dims else []))}]" for dims in _DIMS[name])
    _refuse(
        name,
        f"has shape {list(shape)}, not {wanted}: reshape it, or put it into `tensors` under a name "
        "of its own, where any shape is welcome",
        where,
    )


def _refuse(name: str, why: str, where: Where) -> NoReturn:
    at = "" if where is None else f" (sample {where[1]} in group {where[0]})"
    raise RecordError(f"{name} {why}{at}.", field=name)


def _refuse_reward(reward: Tensor, where: str) -> NoReturn:
    raise RecordError(
        f"the reward of {where} is {reward.detach().item()}, and one such number spoils all "
        "weights: score the sample again, or open the stream with "
        "filters=[redrb.finite_rewards()], which drops such groups.",
        field="reward",
    )
