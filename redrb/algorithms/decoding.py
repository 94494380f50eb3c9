"""Next-token logits of a model, with a cache if it has one.

A module has a cache if its `forward` takes `use_cache`, and `cache` or `past_key_values`, as those
of Hugging Face transformers, where version 5.24 gave the second name up for the first: with
`use_cache=True` it gets the token ids since the last call, `[B, T]`, a mask of all tokens so far,
and the cache of the call before; its output has the new one under the same name. Any other module
computes the whole sequence again for each token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from redrb.algorithms.models import (
    GRIDS,
    NO_INPUTS,
    ModelInputs,
    call,
    forward_names,
    output_tensor,
    positions,
)
from redrb.errors import RecordError

NextToken: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""`(newest [B, T], attention_mask [B, S]) -> logits [B, V]`, called in the order of the tokens."""


def decoder_of(
    model: nn.Module, *, use_cache: bool = True, inputs: ModelInputs = NO_INPUTS
) -> NextToken:
    """Return a function that gives the next logits of one new batch, one call a token."""
    names = forward_names(model)
    cache = next((name for name in ("cache", "past_key_values") if name in names), None)
    if not use_cache or cache is None or "use_cache" not in names:
        return _whole(model, names, inputs)
    if names & inputs.others.keys() & GRIDS:  # positions are not those of the mask
        return _whole(model, names, inputs)
    options: dict[str, Any] = {"use_cache": True}
    if "logits_to_keep" in names:
        options["logits_to_keep"] = 1

    def next_token(newest: Tensor, attention_mask: Tensor) -> Tensor:
        nonlocal inputs
        if "position_ids" in names:
            options["position_ids"] = positions(attention_mask)[:, -newest.shape[1] :]
        output = call(model, newest, attention_mask, inputs=inputs, **options)
        inputs = NO_INPUTS  # later calls find them in the cache
        options[cache] = getattr(output, cache, None)
        if options[cache] is None:
            raise RecordError(
                f"{type(model).__name__} returned no {cache} with use_cache=True: put it into eval "
                "mode, or turn its gradient checkpointing off to sample."
            )
        return _last(output, model, newest.shape[0])

    return next_token


def _whole(model: nn.Module, names: frozenset[str], inputs: ModelInputs) -> NextToken:
    """Return a function that computes all tokens so far at each call."""
    options: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in names else {}
    if "actions" in names:
        options["actions"] = None
    seen: Tensor | None = None

    def next_token(newest: Tensor, attention_mask: Tensor) -> Tensor:
        nonlocal seen, inputs
        if seen is not None:
            inputs = inputs.extended(newest.shape[1])
        seen = newest if seen is None else torch.cat([seen, newest], 1)
        output = call(model, seen, attention_mask, inputs=inputs, **options)
        return _last(output, model, newest.shape[0])

    return next_token


def _last(output: object, model: nn.Module, batch: int) -> Tensor:
    """Return the logits after the last token, `[B, V]`."""
    logits = output_tensor(output, ("logits",), f"the actor {type(model).__name__}")
    if logits.dim() != 3 or logits.shape[0] != batch:
        raise RecordError(
            f"the actor {type(model).__name__} answered with shape {list(logits.shape)}, not "
            f"[{batch}, S, V]."
        )
    return logits[:, -1]
