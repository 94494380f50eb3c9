"""Pads samples to a batch, and splits a batch into its samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from redrb.errors import RecordError
from redrb.experience.padding import (
    ACTION_FIELDS,
    MARKED,
    MASK_DTYPES,
    MASKS,
    SEQUENCE_FIELDS,
    check_side,
    lengths_mask,
    lengths_name,
    pad_value,
    padded_shape,
    row_slice,
)
from redrb.experience.records import (
    TENSOR_FIELDS,
    BufferItem,
    Experience,
    Side,
    batch_size,
    check_tensors,
    named_tensors,
    per_sample,
)

METADATA = ("policy_version", "status", "group_id", "tags", "extras")


def make_experience_batch(items: Sequence[BufferItem], *, side: Side = "left") -> Experience:
    """Pad samples to one batch; the inverse of `split_experience_batch`.

    Sequence-aligned fields are padded to the longest S, action-aligned ones to the longest A, with
    zeros (token versions with -1); dtypes are kept. Further tensors that differ in their first
    dimension are padded too, and get their lengths as `<name>_lengths`; those with one entry a
    token are padded as `sequences` is, and need none. A mask that samples lack is made from their
    lengths, also where these are equal: a batch with sequences has an `attention_mask`, one with
    actions an `action_mask`. Contract: ColossalAI `coati`, whose batches pad on the left.

    Args:
        items: At least one sample; all with the same fields and dtypes.
        side: The side of the padding, "left" or "right".

    Raises:
        RecordError: There is no sample, the side is another, or fields, ranks or dtypes differ.
    """
    side = check_side(side)
    if not items:
        raise RecordError("a batch needs at least one sample.")
    rows = [named_tensors(item) for item in items]
    found = {name for row in rows for name in row}
    names = [name for name in TENSOR_FIELDS if name in found]
    names += sorted(found.difference(TENSOR_FIELDS))
    columns = {name: [row.get(name) for row in rows] for name in names}
    padded: dict[str, Tensor] = {}
    lengths: dict[str, list[int]] = {}
    for name, column in columns.items():
        if name in MASKS:
            continue
        missing = [row for row, tensor in enumerate(column) if tensor is None]
        if missing:
            raise RecordError(
                f"{name} is None in sample {missing[0]} and a tensor in others.", field=name
            )
        present = [tensor for tensor in column if tensor is not None]
        padded[name] = _zero_pad_sequences(present, side, name=name)
        lengths[name] = [tensor.shape[0] if tensor.dim() else 0 for tensor in present]
    for mask, marked in MARKED.items():
        described = next((name for name in marked if name in padded and padded[name].dim() > 1), "")
        column = columns.get(mask, [None] * len(rows))
        made = _batch_mask(mask, column, lengths.get(described), side)
        if made is not None:
            padded[mask] = made if mask in columns else made.to(padded[described].device)
    metadata: dict[str, Any] = {key: [getattr(item, key) for item in items] for key in METADATA}
    return assemble_experience(padded, metadata, side, lengths)


def assemble_experience(
    padded: dict[str, Tensor],
    metadata: dict[str, Any],
    side: Side,
    lengths: Mapping[str, Sequence[int]],
) -> Experience:
    """Return an Experience of padded tensors by name and lists of metadata by name.

    Args:
        lengths: First dimension of each sample's tensor, by name, where samples differ in it; of
            `sequences` and the tensors that are padded to its shape, where any of these differ.
    """
    standard: dict[str, Any] = {name: padded.get(name) for name in TENSOR_FIELDS}
    further = {name: tensor for name, tensor in padded.items() if name not in standard}
    aligned = token_aligned(further, standard["sequences"])
    for name, tensor in list(further.items()):
        found = lengths.get(name, [])
        if found == lengths.get("sequences", []) if name in aligned else len(set(found)) < 2:
            continue
        if lengths_name(name) in padded:
            raise RecordError(
                f"{name} has samples of different lengths, which a batch holds as "
                f"{lengths_name(name)}, and the samples have a tensor of that name: rename it.",
                field=lengths_name(name),
            )
        further[lengths_name(name)] = torch.tensor(found, device=tensor.device)
    return Experience(**standard, tensors=further, padding_side=side, **metadata)


def split_experience_batch(experience: Experience) -> list[BufferItem]:
    """Split a batch into its samples along dimension 0; the inverse of `make_experience_batch`.

    Padding on `experience.padding_side` is removed. A position is padding if its mask is 0 and its
    fields hold the padding value: one repeated token in `sequences`, zeros in the action-aligned
    fields (-1 in token versions). So a masked action with a log-probability stays. A row whose mask
    is 0 everywhere stays whole. A further tensor is cut to its entry in `<name>_lengths`, if the
    batch has them; without, one of the shape of `sequences` is cut with it. The samples are views
    of the batch.

    Raises:
        RecordError: A field has another batch size than the others.
    """
    side = check_side(experience.padding_side)
    rows: list[dict[str, Tensor]] = [{} for _ in range(batch_size(experience))]
    tensors = named_tensors(experience)
    lengths = lengths_of(experience.tensors)
    for name, tensor in tensors.items():
        if name in map(lengths_name, lengths):
            continue
        for row, part in zip(rows, tensor.unbind(0), strict=True):
            row[name] = part
    for name, found in lengths.items():
        for row, length in zip(rows, found, strict=True):
            row[name] = row[name][row_slice(length, row[name].shape[0], side)]
    of_tokens = (*SEQUENCE_FIELDS, *token_aligned(experience.tensors, experience.sequences))
    for row in rows:
        _strip(row, "attention_mask", of_tokens, side)
        _strip(row, "action_mask", ACTION_FIELDS, side)
    return _samples(experience, rows)


def padded_rows(experience: Experience) -> list[BufferItem]:
    """Return the rows of a batch as samples that keep their padding, on the CPU."""
    size = batch_size(experience)
    columns = {
        name: tensor.detach().cpu().unbind(0) for name, tensor in named_tensors(experience).items()
    }
    rows = [{name: column[row] for name, column in columns.items()} for row in range(size)]
    return _samples(experience, rows)


def _samples(experience: Experience, rows: Sequence[dict[str, Tensor]]) -> list[BufferItem]:
    """Return a sample for each row, with the row's metadata."""
    metadata = {key: per_sample(experience, key, len(rows)) for key in METADATA}
    items = []
    for index, row in enumerate(rows):
        standard: dict[str, Any] = {name: row.pop(name, None) for name in TENSOR_FIELDS}
        sample = {key: values[index] for key, values in metadata.items()}
        for key in ("tags", "extras"):  # what is no mapping is refused when it is stored
            given = sample[key] or {}
            sample[key] = dict(given) if isinstance(given, Mapping) else given
        items.append(BufferItem(**standard, tensors=row, **sample))
    return items


def lengths_of(tensors: Mapping[str, Tensor]) -> dict[str, list[int]]:
    """Return the lengths of the samples of further tensors that have `<name>_lengths`."""
    found: dict[str, list[int]] = {}
    check_tensors(tensors)
    for name, tensor in tensors.items():
        lengths = tensors.get(lengths_name(name))
        if lengths is None or lengths.is_floating_point() or lengths.dim() != 1 or tensor.dim() < 2:
            continue
        found[name] = lengths.tolist()
        if not all(0 <= length <= tensor.shape[1] for length in found[name]):
            raise RecordError(
                f"{lengths_name(name)} has {found[name]}, and {name} has room for "
                f"{tensor.shape[1]} in each sample.",
                field=lengths_name(name),
            )
    return found


def token_aligned(tensors: Mapping[str, Tensor], sequences: Tensor | None) -> list[str]:
    """Return the names of a batch's further tensors that have one entry for each token.

    They have the shape of `sequences`, `[B, S]`. Where the samples of such a tensor have other
    lengths than their sequences, the batch has its `<name>_lengths`.
    """
    shape = None if sequences is None else sequences.shape
    return [
        name
        for name, tensor in tensors.items()
        if tensor.shape == shape and lengths_name(name) not in tensors
    ]


def _zero_pad_sequences(
    tensors: Sequence[Tensor], side: str = "left", *, name: str = "sequences"
) -> Tensor:
    """Pad tensors to their longest first dimension and stack them."""
    checked = check_side(side)
    dtype = tensors[0].dtype
    for row, tensor in enumerate(tensors):
        if tensor.dtype != dtype:
            raise RecordError(
                f"{name} is {dtype} in sample 0 and {tensor.dtype} in sample {row}: "
                "a batch needs one dtype a field.",
                field=name,
            )
    shape = padded_shape(name, [tuple(tensor.shape) for tensor in tensors])
    out = torch.full(shape, pad_value(name), dtype=dtype, device=tensors[0].device)
    if len(shape) == 1:
        return torch.stack(list(tensors), out=out)
    for row, tensor in enumerate(tensors):
        out[row, row_slice(tensor.shape[0], shape[1], checked)] = tensor
    return out


def _batch_mask(
    name: str,
    column: Sequence[Tensor | None],
    lengths: Sequence[int] | None,
    side: Side,
) -> Tensor | None:
    """Return the padded mask; for samples without one it is made from their lengths, if known."""
    given = [mask for mask in column if mask is not None]
    if len(given) == len(column):
        return _zero_pad_sequences(given, side, name=name)
    if lengths is None and not given:
        return None
    if lengths is None:
        raise RecordError(f"{name} is None in some samples, and no other field has their lengths.")
    if not given:
        return lengths_mask(lengths, max(lengths), side, MASK_DTYPES[name])
    filled = [
        mask
        if mask is not None
        else torch.ones(length, dtype=given[0].dtype, device=given[0].device)
        for mask, length in zip(column, lengths, strict=True)
    ]
    return _zero_pad_sequences(filled, side, name=name)


def _strip(row: dict[str, Tensor], mask_name: str, names: tuple[str, ...], side: Side) -> None:
    """Remove the padding of a row from the fields that `mask_name` describes."""
    mask = row.get(mask_name)
    if mask is None or mask.dim() != 1 or mask.shape[0] == 0:
        return
    aligned = [
        name
        for name in names
        if name in row and row[name].dim() >= 1 and row[name].shape[0] == mask.shape[0]
    ]
    from_start = side == "left"
    padding = _leading(mask != 0, from_start=from_start)
    if padding in (0, mask.shape[0]):
        return
    for name in aligned:
        field = row[name]
        filler = torch.full_like(field[0], pad_value(name))
        if name == "sequences":  # generators pad with the tokenizer's padding token
            filler = field[0] if from_start else field[-1]
        differs = field != filler
        if field.is_floating_point():  # nan equals nan here
            differs &= ~(field.isnan() & filler.isnan())
        if differs.dim() > 1:
            differs = differs.flatten(1).any(1)
        padding = min(padding, _leading(differs, from_start=from_start))
    for name in aligned:
        row[name] = row[name][padding:] if from_start else row[name][: mask.shape[0] - padding]


def _leading(marks: Tensor, *, from_start: bool) -> int:
    """Return the number of entries before the first mark, from the start or from the end."""
    found = marks.nonzero()
    if found.numel() == 0:
        return int(marks.shape[0])
    return int(found[0, 0]) if from_start else int(marks.shape[0] - 1 - found[-1, 0])
