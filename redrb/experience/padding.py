"""The rules of padding: padding values, masks, and the place of each sample in a batch.

`make_experience_batch` and the decoder share them, so that both build equal batches.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from redrb.errors import RecordError
from redrb.experience.fields import Shape as Shape
from redrb.experience.fields import Side

SEQUENCE_FIELDS = ("sequences", "attention_mask")
"""Fields of length S."""

ACTION_FIELDS = (
    "action_log_probs",
    "values",
    "kl",
    "advantages",
    "action_mask",
    "token_versions",
)
"""Fields of length A (`values`, `kl` and `advantages` may be scalars instead)."""

MARKED = {
    "attention_mask": ("sequences",),
    "action_mask": tuple(name for name in ACTION_FIELDS if name != "action_mask"),
}
"""Mask -> the fields whose padding it marks: the first of them that has lengths gives its own."""

MASKS = frozenset(MARKED)
"""The masks: samples may lack them, because a missing mask can be made."""

MASK_DTYPES = {"attention_mask": torch.int64, "action_mask": torch.bool}
"""Dtype of a mask that is made because no sample has one."""

_PAD_VALUES = {"token_versions": -1}


def with_masks(names: Collection[str]) -> frozenset[str]:
    """Return names of tensors, with those of the masks that mark their padding."""
    return frozenset(names).union(
        mask for mask, marked in MARKED.items() if not set(marked).isdisjoint(names)
    )


def lengths_name(name: str) -> str:
    """Return the name of the tensor with the length of each sample's tensor `name`."""
    return f"{name}_lengths"


def check_side(side: str) -> Side:
    """Return `side`; raises RecordError unless it is "left" or "right"."""
    if side == "left":
        return "left"
    if side == "right":
        return "right"
    raise RecordError(f'padding side {side!r} is neither "left" nor "right".')


def pad_value(name: str) -> int:
    """Return the padding value of a field: -1 for token versions, 0 for all others."""
    return _PAD_VALUES.get(name, 0)


def row_slice(length: int, longest: int, side: Side) -> slice:
    """Return the place of `length` entries in a row of `longest` that is padded on `side`."""
    return slice(longest - length, longest) if side == "left" else slice(0, length)


def padded_shape(name: str, shapes: Sequence[Shape]) -> Shape:
    """Return the shape `[B, longest, ...]` that holds samples of these shapes."""
    first = shapes[0]
    for row, shape in enumerate(shapes):
        if len(shape) != len(first) or shape[1:] != first[1:]:
            raise RecordError(
                f"{name} has shape {list(first)} in sample 0 and {list(shape)} in sample {row}: "
                "only the first dimension may differ within a batch.",
                field=name,
            )
    if not first:
        return (len(shapes),)
    return (len(shapes), max(shape[0] for shape in shapes), *first[1:])


def lengths_mask(
    lengths: Sequence[int], longest: int, side: Side, dtype: torch.dtype, *, pin: bool = False
) -> Tensor:
    """Return a mask `[B, longest]` that is 1 on each row's `lengths` entries, 0 on its padding."""
    if min(lengths) == longest:
        return torch.ones(len(lengths), longest, dtype=dtype, pin_memory=pin)
    sizes = torch.tensor(lengths, dtype=torch.int64)[:, None]
    places = torch.arange(longest)[None, :]
    real = places >= longest - sizes if side == "left" else places < sizes
    mask = real.to(dtype)
    return mask.pin_memory() if pin else mask
