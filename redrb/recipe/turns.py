"""`Turn`: a completion that an episode asks for; turns of several episodes are one batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from redrb.algorithms import generate
from redrb.engines import Generation
from redrb.recipe.sampling import padded


@dataclass(frozen=True, slots=True)
class Turn:
    """One completion that is asked for.

    Attributes:
        tokens: The prompt, with everything that was sampled or given before.
        max_new_tokens: Most tokens.
        stop: Tokens that end the completion, beside EOS.
    """

    tokens: Sequence[int]
    max_new_tokens: int
    stop: tuple[int, ...] = ()


def sampled_turns(
    actor: nn.Module, turns: Sequence[Turn], options: Mapping[str, Any]
) -> list[Generation]:
    """Sample turns, in one batch for each length limit and set of stop tokens.

    Args:
        actor: The policy, in eval mode.
        turns: The turns.
        options: Options of `redrb.algorithms.generate`. After `SamplingEnded` a completion that is
            not complete ends with "abort".
    """
    alike: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for number, turn in enumerate(turns):
        alike.setdefault((turn.max_new_tokens, turn.stop), []).append(number)
    found: dict[int, Generation] = {}
    for (most, stop), numbers in alike.items():
        batch = [turns[number].tokens for number in numbers]
        found.update(zip(numbers, _sampled(actor, batch, most, stop, options), strict=True))
    return [found[number] for number in range(len(turns))]


def _sampled(
    actor: nn.Module,
    batch: Sequence[Sequence[int]],
    most: int,
    stop: tuple[int, ...],
    options: Mapping[str, Any],
) -> list[Generation]:
    eos = options["eos_token_id"]
    ends = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    prompts = padded(
        [torch.as_tensor(tokens, dtype=torch.int64) for tokens in batch], options["pad_token_id"]
    )
    limits = {"max_new_tokens": most, "eos_token_id": [*ends, *stop] or None}
    done = generate(actor, prompts, **{**options, **limits}).rows(range(len(batch)), device="cpu")
    generations = []
    for row in range(len(batch)):
        mask = done.action_mask[row]
        tokens = done.completion(row).tolist()
        versions = done.token_versions
        known = [-1] * len(tokens) if versions is None else versions[row][mask].tolist()
        stopped = done.finished is not None and bool(done.finished[row])
        unfinished = "length" if len(tokens) == most else "abort"
        generations.append(
            Generation(
                tokens,
                done.action_log_probs[row][mask].tolist(),
                known,
                "stop" if stopped else unfinished,  # type: ignore[arg-type]
            )
        )
    return generations
