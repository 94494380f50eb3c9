"""`tokens_of`: prompt and response of a sample, told apart, without padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from redrb.browse.arrays import numbers_of
from redrb.browse.choice import Limits
from redrb.browse.records import TokensView
from redrb.browse.tokenizer import Tokenizer

_OF_ACTIONS: Final = ("action_log_probs", "action_mask", "token_versions", "advantages", "values")
"""Fields whose length is the number of actions, `[A]`."""


def tokens_of(
    arrays: Mapping[str, NDArray[Any]], limits: Limits, tokenizer: Tokenizer | None
) -> TokensView | None:
    """Return the tokens of a sample; None if it has no sequences of token ids.

    The actions are the last A tokens. A sample without fields of actions is a prompt alone.
    """
    ids = arrays.get("sequences")
    if ids is None or ids.ndim != 1 or ids.dtype.kind not in "iu":
        return None
    attention = arrays.get("attention_mask")
    counts = np.ones(len(ids), bool)
    if attention is not None and attention.shape == ids.shape:
        counts = attention != 0
    known = (arrays[name] for name in _OF_ACTIONS if name in arrays)
    actions = min(next((len(array) for array in known if array.ndim == 1), 0), len(ids))
    split = len(ids) - actions
    prompt = ids[:split][counts[:split]]
    kept = np.flatnonzero(counts[split:])[: limits.tokens]
    response = ids[split:][kept]

    def of(name: str) -> NDArray[Any] | None:
        array = arrays.get(name)
        return array[kept] if array is not None and array.shape == (actions,) else None

    def numbers(name: str) -> tuple[float | None, ...]:
        array = of(name)
        return () if array is None else numbers_of(array)

    mask, versions = of("action_mask"), of("token_versions")
    prompt_ids = prompt[-limits.tokens :].tolist()
    response_ids = response.tolist()
    pieces = [] if tokenizer is None else tokenizer.pieces(response_ids)
    return TokensView(
        prompt_ids=tuple(prompt_ids),
        response_ids=tuple(response_ids),
        prompt_text=None if tokenizer is None else tokenizer.text(prompt_ids),
        response_text=None if tokenizer is None else tokenizer.text(response_ids),
        response_pieces=tuple(pieces),
        trained=() if mask is None else tuple((mask != 0).tolist()),
        log_probs=numbers("action_log_probs"),
        advantages=numbers("advantages"),
        values=numbers("values"),
        kl=numbers("kl"),
        versions=() if versions is None else tuple(versions.tolist()),
        prompt_tokens=len(prompt),
        response_tokens=int(counts[split:].sum()),
    )


def text_notes(samples: Sequence[TokensView | None], tokenizer: Tokenizer) -> list[str]:
    """Return why samples of a group have no text, or only a part of it."""
    shown = [each for each in samples if each is not None]
    if not shown:
        return ["its samples have no token ids (sequences), so there is no text"]
    notes = []
    ids = [each for tokens in shown for each in (*tokens.prompt_ids, *tokens.response_ids)]
    unknown = tokenizer.unknown(ids)
    if unknown:
        count = sum(each in unknown for each in ids)
        notes.append(
            f"{count:,} of {len(ids):,} token ids, such as {min(unknown)}, are not in the "
            "vocabulary of the tokenizer and have no text: is it that of the model?"
        )
    if not any(tokens.response_tokens for tokens in shown):
        names = ", ".join(_OF_ACTIONS)
        notes.append(f"no field ({names}) tells which tokens are the response: it is empty")
    return notes
