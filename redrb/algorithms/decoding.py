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
    if not use_cache or inputs.taken_by(names) & GRIDS:  # its positions are not those of the mask
        return _OfWhole(model, names, inputs)
    if "use_cache" in names:
        for argument in ("cache", "past_key_values"):
            if argument in names:
                return _OfTransformers(model, argument, names, inputs)
    return _OfWhole(model, names, inputs)


class _OfTransformers:
    """A module with a cache: each call passes on the one that the call before returned."""

    def __init__(
        self, model: nn.Module, argument: str, names: frozenset[str], inputs: ModelInputs
    ) -> None:
        self._model = model
        self._argument = argument  # the cache has this name in the output, too
        self._inputs = inputs  # of the first call: later ones find them in the cache
        self._options: dict[str, Any] = {"use_cache": True}
        self._positions = "position_ids" in names
        if "logits_to_keep" in names:
            self._options["logits_to_keep"] = 1

    def __call__(self, newest: Tensor, attention_mask: Tensor) -> Tensor:
        options = dict(self._options)
        if self._positions:
            options["position_ids"] = positions(attention_mask)[:, -newest.shape[1] :]
        output = call(self._model, newest, attention_mask, inputs=self._inputs, **options)
        self._inputs = NO_INPUTS
        past = getattr(output, self._argument, None)
        if past is None:
            raise RecordError(
                f"{type(self._model).__name__} returned no {self._argument} with use_cache=True: "
                "put it into eval mode, or turn its gradient checkpointing off to sample."
            )
        self._options[self._argument] = past
        return _last(output, self._model, newest.shape[0])


class _OfWhole:
    """A module without a cache: each call computes all tokens so far."""

    def __init__(self, model: nn.Module, names: frozenset[str], inputs: ModelInputs) -> None:
        self._model = model
        self._inputs = inputs
        self._options: dict[str, Any] = {}
        if "logits_to_keep" in names:
            self._options["logits_to_keep"] = 1
        if "actions" in names:
            self._options["actions"] = None
        self._seen: Tensor | None = None

    def __call__(self, newest: Tensor, attention_mask: Tensor) -> Tensor:
        if self._seen is None:
            tokens = newest
        else:
            tokens = torch.cat([self._seen, newest], 1)
            self._inputs = self._inputs.extended(newest.shape[1])
        self._seen = tokens
        output = call(self._model, tokens, attention_mask, inputs=self._inputs, **self._options)
        return _last(output, self._model, newest.shape[0])


def _last(output: object, model: nn.Module, batch: int) -> Tensor:
    """Return the logits after the last token, `[B, V]`."""
    logits = output_tensor(output, ("logits",), f"the actor {type(model).__name__}")
    if logits.dim() != 3 or logits.shape[0] != batch:
        raise RecordError(
            f"the actor {type(model).__name__} answered with shape {list(logits.shape)}, not "
            f"[{batch}, S, V]."
        )
    return logits[:, -1]
