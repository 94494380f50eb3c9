"""The prompts of a maker: batches for ever, in the recipe's order or in a random one, padded."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from redrb.errors import ConfigError, RecordError

if TYPE_CHECKING:
    from redrb.recipe.language import LanguageRecipe
    from redrb.recipe.recipe import Prompt, Recipe

MIXED = 256
"""Prompts of an iterator that are held, to draw the next one among them at random."""


def endless(recipe: Recipe, random_numbers: random.Random) -> Iterator[Prompt]:
    """Yield the prompts of pass after pass; with `shuffle`, each pass in a random order.

    Raises:
        ConfigError: The recipe has no prompts.
        RecordError: A prompt is no mapping.
    """
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


def prompt_batch(recipe: LanguageRecipe, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Return prompts as one batch, padded on the left.

    Returns:
        `input_ids` and `attention_mask`, int64 `[len(prompts), longest P]`; and each further key of
        the prompts, as a list, or as one tensor if the entries are tensors of one shape. A prompt
        without a key has None there.
    """
    batch: dict[str, Any] = padded([recipe.encode(each) for each in prompts], recipe.pad_token_id)
    for key in dict.fromkeys(key for prompt in prompts for key in prompt if key not in batch):
        values: list[Any] = [prompt.get(key) for prompt in prompts]
        tensors = all(isinstance(each, Tensor) and each.shape == values[0].shape for each in values)
        batch[key] = torch.stack(values) if tensors else values
    return batch


def padded(prompts: Sequence[Tensor], pad: int) -> dict[str, Tensor]:
    """Return token ids, each int64 `[P]`, as one batch, padded on the left."""
    longest = max(len(prompt) for prompt in prompts)
    tokens = torch.full((len(prompts), longest), pad)
    mask = torch.zeros(len(prompts), longest, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        tokens[row, longest - len(prompt) :] = prompt
        mask[row, longest - len(prompt) :] = 1
    return {"input_ids": tokens, "attention_mask": mask}
