"""`CompletionGroups`: a list of prompts becomes as many groups of scored completions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from redrb.algorithms.experience_makers import CompletionScorer
from redrb.algorithms.reward import Reward
from redrb.experience import Experience
from redrb.recipe.group_names import group_names
from redrb.recipe.recipe import Prompt
from redrb.recipe.sampling import prompt_batch, reward_of

if TYPE_CHECKING:
    from redrb.recipe.language import LanguageRecipe


class CompletionGroups:
    """Samples `group_size` completions of each prompt in one batch, and scores them."""

    def __init__(
        self,
        recipe: LanguageRecipe,
        build: Callable[[Reward], CompletionScorer],
    ) -> None:
        """Build the maker of experience that does the work.

        Args:
            recipe: Encodes prompts and scores completions.
            build: Returns the maker of experience for a reward.
        """
        self._recipe = recipe
        self._names = group_names(recipe)
        self._maker = build(reward_of(recipe))
        self._maker.group_size = recipe.group_size

    @property
    def makes_parts(self) -> bool:
        """Whether `make_parts` gives some groups of a batch before the others."""
        return self._maker.makes_parts

    def make_experience(self, inputs: Sequence[Prompt], **generate_kwargs: Any) -> Experience:
        """Return `group_size` scored completions of each prompt, as neighbours.

        Args:
            inputs: The prompts.
            generate_kwargs: Options of `redrb.algorithms.generate`.
        """
        batch, options = self._batch(inputs, generate_kwargs)
        return self._named(self._maker.make_experience(batch, **options))

    def make_parts(self, inputs: Sequence[Prompt], **generate_kwargs: Any) -> Iterator[Experience]:
        """Yield the groups of a batch in parts, those with the first rewards first."""
        batch, options = self._batch(inputs, generate_kwargs)
        for part in self._maker.make_parts(batch, **options):
            yield self._named(part)

    def _batch(
        self, prompts: Sequence[Prompt], options: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        recipe = self._recipe
        return prompt_batch(recipe, prompts), {
            **options,
            "extras": tuple(recipe.extras),
            "tags": tuple(recipe.tags),
        }

    def _named(self, experience: Experience) -> Experience:
        """Name the groups of a batch or of a part of it, and note the maker."""
        size = self._recipe.group_size
        names = [next(self._names) for _ in range(len(experience) // size)]
        experience.group_id = [name for name in names for _ in range(size)]
        tags: Any = experience.tags
        experience.tags = [{"maker": self._recipe.worker, **of_sample} for of_sample in tags]
        return experience
