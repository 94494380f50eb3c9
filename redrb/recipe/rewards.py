"""Rewards of completions: the only place that calls a recipe's rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from redrb.algorithms import Completions
from redrb.recipe.completion import Completion

if TYPE_CHECKING:
    from redrb.recipe.language import LanguageRecipe


def completions_of(
    recipe: LanguageRecipe, prompts: Sequence[Mapping[str, Any]], done: Completions
) -> list[Completion]:
    """Return each row of sampled completions with its prompt.

    Args:
        recipe: Decodes token ids.
        prompts: The prompt of each row.
        done: The sampled completions, B rows.
    """
    ends = torch.tensor(recipe.ends)
    found = []
    for row, prompt in enumerate(prompts):
        tokens = done.completion(row).cpu()
        finished = bool(len(tokens)) and bool(torch.isin(tokens[-1], ends))
        found.append(Completion(prompt, done.prompt(row).cpu(), tokens, finished, recipe.decode))
    return found


def scores(recipe: LanguageRecipe, completions: Sequence[Completion]) -> list[float]:
    """Return the reward of each completion."""
    return [float(reward) for reward in recipe.rewards(completions)]
