"""Batches of prompts: token ids padded on the left, further keys, and inputs such as images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from redrb.algorithms.models import NO_INPUT, NO_INPUTS, ModelInputs, forward_names
from redrb.errors import RecordError
from redrb.experience.padding import lengths_name, padded_shape

_TOKEN_KEYS = frozenset(("input_ids", "attention_mask"))

_UNUSED_KEYS = frozenset(
    (
        "token_type_ids",
        "position_ids",
        "special_tokens_mask",
        "length",
        "offset_mapping",
        "overflowing_tokens",
        "num_truncated_tokens",
        "overflow_to_sample_mapping",
    )
)
"""Further keys of tokenizers, which neither sampling nor rewards need."""


def read_prompts(prompts: object, *, pad_token_id: int | None = None) -> tuple[Tensor, Tensor]:
    """Return token ids and attention mask of a batch of prompts, padded on the left.

    Args:
        prompts: As for `generate`, padded on either side.
        pad_token_id: Token for padding, where there is no mask.

    Returns:
        Token ids and mask, int64 `[B, P]` each.

    Raises:
        RecordError: The prompts are no tensor or mapping of tensors, or padded between tokens.
    """
    if isinstance(prompts, Mapping):
        if "input_ids" not in prompts:
            raise RecordError(
                f"prompts came as a mapping with {', '.join(map(str, prompts)) or 'nothing'}: it "
                "needs input_ids, and may have attention_mask and further keys with an entry for "
                "each prompt."
            )
        tokens, mask = prompts["input_ids"], prompts.get("attention_mask")
    else:
        tokens, mask = prompts, None
    tokens = _matrix(tokens, "prompts" if tokens is prompts else "input_ids")
    if mask is None:
        mask = torch.ones_like(tokens)
        if pad_token_id is not None:
            counts = (tokens != pad_token_id).long()
            mask = counts.cummax(1).values * counts.flip(1).cummax(1).values.flip(1)
    mask = _matrix(mask, "attention_mask")
    if mask.shape != tokens.shape:
        raise RecordError(
            f"attention_mask has shape {list(mask.shape)}, input_ids {list(tokens.shape)}.",
            field="attention_mask",
        )
    return _padded_left(tokens, mask)


def further_keys(prompts: object) -> dict[str, Any]:
    """Return the keys of a batch of prompts beside its tokens: lists and tensors with B entries.

    Raises:
        RecordError: A key has no entry for each prompt.
    """
    if not isinstance(prompts, Mapping) or "input_ids" not in prompts:
        return {}
    rows = len(prompts["input_ids"])
    found = {}
    for key, values in prompts.items():
        if key in _TOKEN_KEYS or key in _UNUSED_KEYS:
            continue
        if not has_entries(values, rows):
            sized = f" of {len(values)}" if isinstance(values, list | tuple) else ""
            size = f" of shape {list(values.shape)}" if isinstance(values, Tensor) else sized
            raise RecordError(
                f"the key {key!r} of {rows} prompts is a {type(values).__name__}{size}: "
                "give a list or a tensor with an entry for each prompt.",
                field=str(key),
            )
        found[str(key)] = values
    return found


def has_entries(values: object, rows: int) -> bool:
    """Return whether a value of a batch of prompts has an entry for each of them."""
    if isinstance(values, Tensor):
        return values.dim() > 0 and values.shape[0] == rows
    return isinstance(values, list | tuple) and len(values) == rows


def repeated(values: Any, times: int) -> Any:
    """Return a tensor or list in which each entry stands `times` times in succession."""
    if isinstance(values, Tensor):
        return values.repeat_interleave(times, 0)
    return [value for value in values for _ in range(times)]


def chosen(keys: Mapping[str, Any], names: Sequence[str], rows: int) -> list[dict[str, Any]]:
    """Return some keys' entries for each row, as plain values; raises RecordError without one."""
    for name in names:
        if name not in keys:
            known = ", ".join(map(repr, keys)) or "none"
            raise RecordError(
                f"prompts have no key {name!r}; beside their tokens they have {known}.", field=name
            )
    entries = [{name: keys[name][row] for name in names} for row in range(rows)]
    return [
        {name: each.tolist() if isinstance(each, Tensor) else each for name, each in entry.items()}
        for entry in entries
    ]


def _padded_left(tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return prompts with their padding moved to the left, because completions follow directly."""
    counts = (mask != 0).long()
    begins = counts[:, 0] + (counts[:, 1:] > counts[:, :-1]).sum(1)
    if not bool((begins == 1).all()):
        raise RecordError(
            "prompts must have at least one token each, and padding only before or after their "
            "tokens, not between them.",
            field="attention_mask",
        )
    if bool(counts[:, -1].all()):
        return tokens, counts
    order = counts.argsort(dim=1, stable=True)
    return tokens.gather(1, order), counts.gather(1, order)


def _matrix(tensor: object, name: str) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise RecordError(
            f"{name} came as a {type(tensor).__name__}: give a tensor of token ids [B, P], or a "
            "mapping of tensors with input_ids and attention_mask.",
            field=name,
        )
    if tensor.dim() != 2 or tensor.numel() == 0 or tensor.is_floating_point():
        raise RecordError(
            f"{name} is {tensor.dtype} of shape {list(tensor.shape)}: it must hold integers, "
            "[B, P], and not be empty.",
            field=name,
        )
    return tensor.long()


def prompt_inputs(
    model: nn.Module, prompts: object, *, pad_token_id: int | None = None
) -> ModelInputs:
    """Return the inputs of a model in prompts, aligned with what `read_prompts` returns.

    An input is a list with a tensor or an array of numpy for each prompt, or a tensor `[B, ...]`,
    under a name that the model's `forward` has; all are inputs of a `forward` with the argument
    `inputs`. Tensors in a list may differ in their first dimension. None in a list, for a prompt
    without an image, counts as a tensor with a first dimension of 0;
    it needs two or more dimensions.

    Raises:
        RecordError: The tensors of a key have other dimensions or dtypes than each other, or a
            prompt lacks one that has fewer than two dimensions.
    """
    names, keys = forward_names(model), further_keys(prompts)
    wanted = keys.keys() - NO_INPUT if "inputs" in names else (keys.keys() & names) - NO_INPUT
    found = {name: _tensors(name, keys[name]) for name in keys if name in wanted}
    given = {name: values for name, values in found.items() if values is not None}
    if not given:
        return NO_INPUTS
    tokens, mask = read_prompts(prompts, pad_token_id=pad_token_id)
    tensors: dict[str, Tensor] = {}
    for name, values in given.items():
        if isinstance(values, Tensor):
            tensors[name] = values
            if lengths_name(name) in keys:
                tensors[lengths_name(name)] = keys[lengths_name(name)]
        else:
            tensors |= _padded(name, values, mask)
    whole = {name for name, values in given.items() if isinstance(values, Tensor)}
    inputs = ModelInputs.of(tensors, tokens)
    if not whole & inputs.aligned.keys() or not isinstance(prompts, Mapping):
        return inputs
    stored = prompts.get("attention_mask")
    if stored is None:
        if torch.equal(tokens, prompts["input_ids"]):
            return inputs
        raise RecordError(
            "prompts that are padded on the right need an attention_mask beside inputs that have "
            "an entry for each token.",
            field="attention_mask",
        )
    # rows that were padded on the right have been moved to the left
    moved = inputs.reordered((stored != 0).long().argsort(dim=1, stable=True))
    kept = {name: each for name, each in inputs.aligned.items() if name not in whole}
    return ModelInputs({**moved.aligned, **kept}, inputs.others, inputs.lengths)


def _tensors(name: str, values: Any) -> Tensor | list[Tensor] | None:
    """Return the values of a key as tensors; None if they are others, such as texts."""
    if isinstance(values, Tensor):
        return values
    known = [value for value in values if value is not None]
    if not known or not all(isinstance(value, Tensor | np.ndarray) for value in known):
        return None
    like = torch.as_tensor(known[0])
    if len(known) < len(values) and like.dim() < 2:
        raise RecordError(
            f"some prompts have no {name!r}, and those of others are {list(like.shape)}: only "
            "tensors with two or more dimensions, such as patches, may be left out.",
            field=name,
        )
    return [
        like.new_zeros(0, *like.shape[1:]) if value is None else torch.as_tensor(value)
        for value in values
    ]


def _padded(name: str, values: Sequence[Tensor], mask: Tensor) -> dict[str, Tensor]:
    """Return tensors padded on the left, with their lengths where these differ."""
    if any(value.dtype != values[0].dtype for value in values):
        raise RecordError(f"the tensors of {name!r} have several dtypes.", field=name)
    shape = padded_shape(name, [tuple(value.shape) for value in values])
    if len(shape) == 1:
        return {name: torch.stack(list(values))}
    lengths = [len(value) for value in values]
    of_tokens = len(shape) == 2 and lengths == mask.sum(1).tolist()
    if of_tokens:
        shape = (len(values), mask.shape[1])
    out = values[0].new_zeros(shape)
    for row, value in zip(out, values, strict=True):
        row[shape[1] - len(value) :] = value
    if of_tokens or (len(set(lengths)) == 1 and shape != tuple(mask.shape)):
        return {name: out}
    return {name: out, lengths_name(name): torch.tensor(lengths)}
