"""A list of prompts becomes groups: of scored completions, or of a recipe's rollouts."""

from __future__ import annotations

import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from redrb.algorithms import Completion as Completion  # for `redrb.recipe`
from redrb.algorithms.experience_makers import CompletionScorer
from redrb.algorithms.models import evaluating
from redrb.algorithms.user_functions import Calls
from redrb.experience import BufferItem, Experience, make_experience_batch, split_experience_batch
from redrb.experience.faults import Fault, fault_extra, log_filtered, raised
from redrb.recipe.prompts import prompt_batch
from redrb.train.episodes.groups import samples_of

if TYPE_CHECKING:
    from redrb.recipe.language import LanguageRecipe
    from redrb.recipe.recipe import Prompt, Recipe


def group_names(recipe: Recipe) -> Iterator[str]:
    """Yield a new name for each group that this process makes."""
    return (f"{recipe.worker}-{number}" for number in itertools.count(1))


class PromptGroups(ABC):
    """Makes a group of each prompt; a maker of experience that gives a batch in parts."""

    @abstractmethod
    def make_parts(self, inputs: Sequence[Prompt], **options: Any) -> Iterator[Experience]:
        """Yield the groups of all prompts in parts, those that are ready first go first."""

    def make_experience(self, inputs: Sequence[Prompt], **options: Any) -> Experience:
        """Return the samples of all prompts; those of one prompt are one group.

        Raises:
            RecordError: No group could be made.
        """
        parts = list(self.make_parts(inputs, **options))
        items = [item for part in parts for item in split_experience_batch(part)]
        return parts[0] if len(parts) == 1 else make_experience_batch(items)


class CompletionGroups(PromptGroups):
    """Samples `group_size` completions of each prompt in one batch, and scores them."""

    def __init__(self, recipe: LanguageRecipe, maker: CompletionScorer) -> None:
        """Encode prompts by a recipe, for a maker of experience that does the work."""
        self._recipe, self._maker = recipe, maker
        self._names = group_names(recipe)

    def make_parts(self, inputs: Sequence[Prompt], **options: Any) -> Iterator[Experience]:
        """Yield `group_size` scored completions of each prompt, as neighbours."""
        recipe = self._recipe
        keys = {"extras": tuple(recipe.extras), "tags": tuple(recipe.tags)}
        for part in self._maker.make_parts(prompt_batch(recipe, inputs), **options, **keys):
            names = [next(self._names) for _ in range(len(part) // recipe.group_size)]
            part.group_id = [name for name in names for _ in range(recipe.group_size)]
            tags: Any = part.tags
            part.tags = [{"maker": recipe.worker, **of_sample} for of_sample in tags]
            yield part


_log = logging.getLogger("redrb")


class RolloutGroups(PromptGroups):
    """Calls a recipe's `rollout` for each prompt; coroutines run at the same time.

    A rollout that raises, returns no samples, or lasts longer than `rollout_timeout` costs only its
    group; the log says why, and `take_failed` counts it.

    Attributes:
        stop: Begins no further rollout; coroutines that run have half of `stop_timeout` to end.
            Another thread or a signal handler may call it.
    """

    parts_use_models = True

    def __init__(self, recipe: Recipe, models: dict[str, nn.Module]) -> None:
        self._recipe, self._models = recipe, models
        self._names = group_names(recipe)
        self._failed = 0
        self._explained = False
        self._calls = Calls(recipe.rollout_timeout, stop_timeout=recipe.stop_timeout / 2)
        self.stop = self._calls.stop

    def take_failed(self) -> int:
        """Return how many groups have failed since the last call."""
        failed, self._failed = self._failed, 0
        return failed

    @torch.no_grad()
    def make_parts(self, inputs: Sequence[Prompt], **_options: Any) -> Iterator[Experience]:
        """Yield the groups of all prompts in parts, as they are ready."""
        rollout, models = self._recipe.rollout, self._models
        with evaluating(*models.values()):
            calls = [partial(rollout, models, prompt) for prompt in inputs]
            for ready in self._calls.results(calls):
                groups = (self._group(inputs[number], found) for number, found in ready)
                if items := [item for group in groups for item in group]:
                    yield make_experience_batch(items)

    def _group(self, prompt: Prompt, found: Any) -> list[BufferItem]:
        """Return the samples of a group, with its name; none if its rollout failed."""
        try:
            if isinstance(found, BaseException):
                raise found
            items = samples_of(found, "it")
        except Exception as error:  # noqa: BLE001 (what a rollout returned or raised)
            self._failed += 1
            _log.warning(
                "a group is filtered: the rollout of the prompt %.200r raised %s: %.500s",
                prompt,
                type(error).__name__,
                error,
                exc_info=None if self._explained else error,
                extra=fault_extra(raised("the rollout", error)),
            )
            self._explained = True
            return []
        rewards = [item.reward for item in items if item.reward is not None]
        bad = sum(not bool(reward.isfinite().all()) for reward in rewards)
        if bad:  # the task drops the group
            fault = Fault(
                "the reward", "that the rollout returned is nan or infinite", "rollout reward"
            )
            text = "a group is filtered: %s, of %d of its %d samples"
            log_filtered(fault, text, fault, bad, len(items))
        name = next(self._names)
        for item in items:
            item.group_id = name
        return items
