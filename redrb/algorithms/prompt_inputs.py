"""The keys of a batch of prompts that a model takes beside token ids, such as images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from redrb.algorithms.model_inputs import NO_INPUT, NO_INPUTS, ModelInputs
from redrb.algorithms.models import forward_names
from redrb.algorithms.prompts import further_keys, read_prompts
from redrb.errors import RecordError
from redrb.experience.padding import lengths_name, padded_shape


def prompt_inputs(
    model: nn.Module, prompts: object, *, pad_token_id: int | None = None
) -> ModelInputs:
    """Return the inputs of a model in prompts, aligned with what `read_prompts` returns.

    An input is a list with a tensor or an array of numpy for each prompt, or a tensor `[B, ...]`,
    under a name that the model's `forward` has; all are inputs of a `forward` with the argument
    `inputs`. Tensors in a list may differ in their first dimension. None in a list, for a prompt
    without an image, counts as a tensor with a first dimension of 0;
    it needs two or more dimensions.

    Args:
        model: The model.
        prompts: As for `redrb.algorithms.generate`.
        pad_token_id: As for `read_prompts`.

    Raises:
        RecordError: The tensors of a key have other dimensions or dtypes than each other, or a
            prompt lacks one that has fewer than two dimensions.
    """
    names, keys = forward_names(model), further_keys(prompts)
    candidates = {
        name: values
        for name, values in keys.items()
        if name not in NO_INPUT and ("inputs" in names or name in names)
    }
    given = {
        name: found
        for name, values in candidates.items()
        if (found := _tensors(name, values)) is not None
    }
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
    if len(shape) == 2 and lengths == mask.sum(1).tolist():  # one entry a token
        shape = (len(values), mask.shape[1])
    out = values[0].new_zeros(shape)
    for row, value in zip(out, values, strict=True):
        row[shape[1] - len(value) :] = value
    if len(set(lengths)) == 1 or shape == tuple(mask.shape):
        return {name: out}
    return {name: out, lengths_name(name): torch.tensor(lengths)}
