"""The checks of a group's numbers and fields: finite where they count, the same in each sample."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from redrb.errors import RecordError
from redrb.experience.padding import MASKS
from redrb.experience.records import BufferItem, named_tensors
from redrb.experience.status import Status

VALUE_FIELDS = ("action_log_probs", "values", "kl", "advantages")
"""Fields whose numbers are checked; rewards always are."""


def check_values(group: Sequence[BufferItem], at: int) -> None:
    """Refuse a group with a number that is nan or infinite, where `action_mask` counts it.

    The encoder has found that a number is; this looks for the first one that counts.

    Losses skip masked positions, which may therefore hold anything: a masked token may have a
    log-probability of -inf. A scalar field counts as a whole.
    """
    for place, item in enumerate(group):
        for name in VALUE_FIELDS:
            found = _first_bad(getattr(item, name), item.action_mask)
            if found is not None:
                position, value = found
                there = "" if position is None else f" at position {position}"
                raise RecordError(
                    f"{name} of sample {place} in group {at} is {value}{there}, and one such "
                    "number spoils all weights: compute it again, mask its position with "
                    'action_mask, or open the stream without the check "values".',
                    field=name,
                    group=at,
                    sample=place,
                    position=position,
                )


def check_alike(group: Sequence[BufferItem], at: int) -> None:
    """Refuse a group whose samples differ in the fields that they have, or in a field's dtype.

    There is no batch of them. Masks are left out, because a missing mask can be made. So are groups
    with unfinished samples, which may lack fields until they are finished.
    """
    if any(item.status == Status.ABORTED for item in group):
        return
    first: dict[str, torch.dtype] = {}
    for place, item in enumerate(group):
        named = named_tensors(item).items()
        dtypes = {name: tensor.dtype for name, tensor in named if name not in MASKS}
        first = first if place else dtypes
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


@torch.no_grad()
def _first_bad(tensor: Tensor | None, mask: Tensor | None) -> tuple[int | None, float] | None:
    """Return position and value of the first number that counts and is not finite."""
    if tensor is None or not tensor.is_floating_point() or not tensor.numel():
        return None
    bad = ~tensor.double().isfinite()
    if tensor.dim() and mask is not None:
        bad &= mask.to(bad.device) != 0
    places = bad.reshape(-1).nonzero()
    if not len(places):
        return None
    place = int(places[0])
    return place if tensor.dim() else None, float(tensor.detach().reshape(-1)[place])
