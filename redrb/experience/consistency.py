"""The checks of a group's numbers and fields: finite where they count, the same in each sample."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from redrb.errors import RecordError
from redrb.experience.checking import all_finite
from redrb.experience.padding import MASKS
from redrb.experience.records import BufferItem, Experience, named_tensors

VALUE_FIELDS = ("action_log_probs", "values", "kl", "advantages")
"""Fields whose numbers are checked; rewards always are."""


def check_values(group: Sequence[BufferItem], at: int) -> None:
    """Refuse a group with a number that is nan or infinite, where `action_mask` counts it.

    The encoder has found that a number is; this looks for the first one that counts.

    Losses skip masked positions, which may therefore hold anything: a masked token may have a
    log-probability of -inf. A scalar field counts as a whole.

    Raises:
        RecordError: The message names group, sample, field and position.
    """
    for place, item in enumerate(group):
        for name in VALUE_FIELDS:
            found = _first_bad(getattr(item, name), item.action_mask)
            if found is not None:
                raise _value_error(name, *found, f"sample {place} in group {at}", (at, place))


def check_values_of_rows(experience: Experience) -> dict[int, RecordError]:
    """Return the error for each row of a batch that `check_values` would refuse."""
    named = [(name, getattr(experience, name)) for name in VALUE_FIELDS]
    found: dict[int, RecordError] = {}
    for name, tensor in named:
        if tensor is None or not _is_float(tensor) or all_finite([tensor]):
            continue
        masks = experience.action_mask
        for row, values in enumerate(tensor):
            bad = _first_bad(values, None if masks is None else masks[row])
            if bad is not None:
                found.setdefault(row, _value_error(name, *bad, f"row {row}", (row, 0)))
    return found


def check_alike(group: Sequence[BufferItem], at: int) -> None:
    """Refuse a group whose samples differ in the fields that they have, or in a field's dtype.

    There is no batch of them. Masks are left out, because a missing mask can be made.

    Raises:
        RecordError: The message names group, sample and field.
    """
    first = dict(_dtypes(group[0]))
    for place, item in enumerate(group):
        dtypes = dict(_dtypes(item))
        for name in (*first, *dtypes):
            one, other = first.get(name), dtypes.get(name)
            if one == other:
                continue
            if one is None:
                why = f"is a tensor in sample {place} of group {at} and missing in sample 0"
            elif other is None:
                why = f"is missing in sample {place} of group {at} and a tensor in sample 0"
            else:
                why = f"is {other} in sample {place} of group {at} and {one} in sample 0"
            raise RecordError(
                f"{name} {why}: there is no batch of such samples. Give all samples of a task the "
                'same fields and dtypes, or open the stream without the check "fields".',
                field=name,
                group=at,
                sample=place,
            )


def _dtypes(item: BufferItem) -> Iterator[tuple[str, torch.dtype]]:
    for name, tensor in named_tensors(item).items():
        if name not in MASKS:
            yield name, tensor.dtype


def _is_float(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.numel() > 0


@torch.no_grad()
def _first_bad(tensor: Tensor | None, mask: Tensor | None) -> tuple[int | None, float] | None:
    """Return position and value of the first number that counts and is not finite."""
    if tensor is None or not _is_float(tensor):
        return None
    bad = ~tensor.double().isfinite()
    if tensor.dim() and mask is not None:
        bad &= mask.to(bad.device) != 0
    places = bad.reshape(-1).nonzero()
    if not len(places):
        return None
    place = int(places[0])
    return place if tensor.dim() else None, float(tensor.detach().reshape(-1)[place])


def _value_error(
    name: str, position: int | None, value: float, where: str, place: tuple[int, int]
) -> RecordError:
    at = "" if position is None else f" at position {position}"
    return RecordError(
        f"{name} of {where} is {value}{at}, and one such number spoils all weights: compute it "
        "again, mask its position with action_mask, or open the stream without the check "
        '"values".',
        field=name,
        group=place[0],
        sample=place[1],
        position=position,
    )
