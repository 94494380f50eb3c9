"""Experience makers of recipes: a list of prompts becomes as many groups."""

from __future__ import annotations

import asyncio
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from redrb.algorithms import Completions
from redrb.algorithms.completion_scorer import CompletionScorer
from redrb.algorithms.models import evaluating
from redrb.experience import BufferItem, Experience, make_experience_batch, split_experience_batch
from redrb.recipe.recipe import Prompt, Recipe
from redrb.recipe.rewards import completions_of, scores
from redrb.recipe.sampling import padded

if TYPE_CHECKING:
    from redrb.recipe.language import LanguageRecipe

Score = Callable[[Completions], Sequence[float]]


class RolloutGroups:
    """Calls a recipe's `rollout` for each prompt; coroutines run together."""

    def __init__(self, recipe: Recipe, models: dict[str, nn.Module]) -> None:
        self._recipe, self._models = recipe, models
        self._names = group_names(recipe)

    @torch.no_grad()
    def make_experience(self, inputs: Sequence[Prompt], **generate_kwargs: Any) -> Experience:  # noqa: ARG002
        """Return the samples of all prompts; those of one prompt are one group."""
        with evaluating(*self._models.values()):
            made = [self._recipe.rollout(self._models, prompt) for prompt in inputs]
            awaited = [each for each in made if inspect.isawaitable(each)]
            results = iter(asyncio.run(_all(awaited)) if awaited else [])
            groups = [next(results) if inspect.isawaitable(each) else each for each in made]
        items: list[BufferItem] = []
        for group in groups:
            samples = split_experience_batch(group) if isinstance(group, Experience) else group
            name = next(self._names)
            for item in samples:
                item.group_id = name
            items += samples
        return make_experience_batch(items)


class CompletionGroups:
    """Samples `group_size` completions of each prompt in one batch, and scores them.

    Args:
        recipe: Encodes prompts and scores completions.
        build: Returns the maker of experience for a function that scores completions.
        repeats: How often a prompt stands in a batch for that maker: 1 if it repeats them itself.
    """

    def __init__(
        self,
        recipe: LanguageRecipe,
        build: Callable[[Score], CompletionScorer],
        *,
        repeats: int,
    ) -> None:
        self._recipe, self._build, self._repeats = recipe, build, repeats
        self._names = group_names(recipe)

    def make_experience(self, inputs: Sequence[Prompt], **generate_kwargs: Any) -> Experience:
        """Return `group_size` scored completions of each prompt, as neighbours.

        Args:
            inputs: The prompts.
            generate_kwargs: Options of `redrb.algorithms.generate`.
        """
        recipe, prompts = self._recipe, inputs
        of_rows = [prompt for prompt in prompts for _ in range(recipe.group_size)]

        def score(done: Completions) -> list[float]:
            return scores(recipe, completions_of(recipe, done.keys["prompt"], done))

        tokens = [recipe.encode(prompt) for prompt in prompts]
        repeated: list[Tensor] = [each for each in tokens for _ in range(self._repeats)]
        of_repeated = [prompt for prompt in prompts for _ in range(self._repeats)]
        batch = {**padded(repeated, recipe.pad_token_id), "prompt": of_repeated}
        experience = self._build(score).make_experience(batch, **generate_kwargs)
        names = [next(self._names) for _ in prompts]
        experience.group_id = [name for name in names for _ in range(recipe.group_size)]
        experience.extras = [{key: prompt[key] for key in recipe.extras} for prompt in of_rows]
        experience.tags = [
            {"maker": recipe.worker, **{key: prompt[key] for key in recipe.tags}}
            for prompt in of_rows
        ]
        return experience


def group_names(recipe: Recipe) -> Iterator[str]:
    """Yield a new name for each group that this process makes."""
    return (f"{recipe.worker}-{number}" for number in itertools.count(1))


async def _all(awaited: Sequence[Any]) -> list[Any]:
    return list(await asyncio.gather(*awaited))
