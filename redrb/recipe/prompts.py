"""The prompts of a maker: batches for ever, in the recipe's order or in a random one."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from redrb.errors import ConfigError, RecordError
from redrb.recipe.recipe import Prompt, Recipe

MIXED = 256
"""Prompts of an iterator that are held, to draw the next one among them at random."""


def prompt_batches(recipe: Recipe, random_numbers: random.Random) -> Iterator[list[Prompt]]:
    """Yield batches of `prompts_per_step` prompts for ever; a batch may span two passes.

    Raises:
        ConfigError: The recipe has no prompts.
        RecordError: A prompt is no mapping.
    """
    prompts = endless(recipe, random_numbers)
    while True:
        yield list(islice(prompts, recipe.prompts_per_step))


def endless(recipe: Recipe, random_numbers: random.Random) -> Iterator[Prompt]:
    """Yield the prompts of pass after pass; with `shuffle`, each pass in a random order."""
    while True:
        count, prompts = 0, recipe.prompts()
        for prompt in shuffled(prompts, random_numbers) if recipe.shuffle else prompts:
            if not isinstance(prompt, Mapping):
                raise RecordError(
                    f"a prompt is a {type(prompt).__name__}: `prompts` gives dicts.", field="prompt"
                )
            yield prompt
            count += 1
        if not count:
            raise ConfigError(f"the recipe {type(recipe).__name__} has no prompts.")


def shuffled(prompts: Iterable[Any], random_numbers: random.Random) -> Iterator[Any]:
    """Yield prompts in random order: those of a sequence wholly, others among the next `MIXED`."""
    listed: Any = prompts
    if hasattr(prompts, "__len__") and hasattr(prompts, "__getitem__"):  # datasets are no Sequence
        for index in random_numbers.sample(range(len(listed)), len(listed)):
            yield listed[index]
        return
    iterator = iter(prompts)
    held = list(islice(iterator, MIXED))
    for prompt in iterator:
        index = random_numbers.randrange(len(held))
        chosen, held[index] = held[index], prompt
        yield chosen
    random_numbers.shuffle(held)
    yield from held
