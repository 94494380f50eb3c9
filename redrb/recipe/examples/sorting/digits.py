"""The demo's task: sort digits. Its reward is exact and needs no reward model.

A prompt is `BOS d d d d SEP`, the completion that earns 1.0 is `d d d d EOS` in ascending order.
Prompts have 4 to 6 digits, no digit twice, and a policy may end early or late, so lengths differ
on both sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

PAD, BOS, SEP, EOS = 0, 1, 2, 3
FIRST_DIGIT = 4
"""Token of digit 0; digit d is token `FIRST_DIGIT + d`."""

VOCABULARY_SIZE = FIRST_DIGIT + 10

MIN_DIGITS, MAX_DIGITS = 4, 6
MAX_PROMPT_TOKENS = MAX_DIGITS + 2
MAX_NEW_TOKENS = MAX_DIGITS + 2
"""One more than the longest right answer with its EOS, so that a policy can end too late."""

HELD_OUT_SEED = 20_011
HELD_OUT_COUNT = 512


def make_prompt(digits: Sequence[int]) -> Tensor:
    """Return the prompt that asks to sort `digits` (each 0 to 9), int64 `[len(digits) + 2]`."""
    return torch.tensor([BOS, *(FIRST_DIGIT + digit for digit in digits), SEP])


def target(prompt: Tensor) -> Tensor:
    """Return the only right completion of `prompt`, int64 `[digits + 1]`, EOS included."""
    return torch.tensor(_answer(prompt))


def reward(prompt: Tensor, completion: Tensor) -> float:
    """Return 1.0 where `completion` is the sorted digits and EOS and nothing else, else 0.0.

    Args:
        prompt: Token ids without padding, int64 `[P]`.
        completion: Token ids without padding, int64 `[any]`.
    """
    return float(completion.tolist() == _answer(prompt))


def sample_prompts(generator: torch.Generator, count: int) -> list[Tensor]:
    """Draw `count` training prompts, none of which is held out, each int64 `[6..8]`.

    Lengths are uniform over 4 to 6 digits, and so are the digits over all that differ.
    """
    held_out = _held_out_digits()
    prompts: list[Tensor] = []
    while len(prompts) < count:
        digits = _random_digits(generator)
        if digits not in held_out:
            prompts.append(make_prompt(digits))
    return prompts


def held_out_prompts() -> list[Tensor]:
    """Return the 512 different prompts of the fixed evaluation set, each int64 `[6..8]`."""
    return [make_prompt(digits) for digits in sorted(_held_out_digits())]


def show(tokens: Tensor) -> str:
    """Return tokens for people, for example `[BOS]351[SEP]135[EOS]`; padding is left out."""
    names = {PAD: "", BOS: "[BOS]", SEP: "[SEP]", EOS: "[EOS]"}
    return "".join(names.get(token, str(token - FIRST_DIGIT)) for token in tokens.tolist())


def _answer(prompt: Tensor) -> list[int]:
    return [*sorted(token for token in prompt.tolist() if token >= FIRST_DIGIT), EOS]


@lru_cache(maxsize=1)
def _held_out_digits() -> frozenset[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(HELD_OUT_SEED)
    found: set[tuple[int, ...]] = set()
    while len(found) < HELD_OUT_COUNT:
        found.add(_random_digits(generator))
    return frozenset(found)


def _random_digits(generator: torch.Generator) -> tuple[int, ...]:
    count = int(torch.randint(MIN_DIGITS, MAX_DIGITS + 1, (), generator=generator))
    return tuple(torch.randperm(10, generator=generator)[:count].tolist())
