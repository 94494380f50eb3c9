"""`EpisodeGroups`: runs a recipe's episodes of a list of prompts together, each prompt a group."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from redrb.algorithms import group_relative_advantages
from redrb.algorithms.batches import REFERENCE_LOG_PROBS, TrainingBatch
from redrb.algorithms.log_probs import action_log_probs
from redrb.algorithms.models import action_logits, evaluating
from redrb.engines import Trajectory
from redrb.errors import RecordError
from redrb.experience import BufferItem, Experience, make_experience_batch
from redrb.recipe.groups import group_names
from redrb.recipe.local_engine import LocalEngine
from redrb.recipe.recipe import Prompt

if TYPE_CHECKING:
    from redrb.recipe.episodes import EpisodeRecipe

_log = logging.getLogger("redrb")


class EpisodeGroups:
    """Calls a recipe's `episode`, `group_size` times for each prompt, all at the same time.

    Attributes:
        version: Returns the version of the actor's weights, None if it is not known; makers set it.
    """

    def __init__(
        self,
        recipe: EpisodeRecipe,
        actor: nn.Module,
        reference: nn.Module | None = None,
    ) -> None:
        self._recipe, self._actor, self._reference = recipe, actor, reference
        self._names = group_names(recipe)
        self.version: Callable[[], int | None] = lambda: None

    def make_experience(self, inputs: Sequence[Prompt], **generate_kwargs: Any) -> Experience:
        """Return the samples of all episodes, with advantages relative to their group.

        The reward of a group with an episode that failed is nan: such a group is filtered.

        Args:
            inputs: The prompts.
            generate_kwargs: Options of `redrb.algorithms.generate`.
        """
        size = self._recipe.group_size
        groups = self.run(inputs, size, generate_kwargs)
        for prompt, group in zip(inputs, groups, strict=True):
            self._complete(prompt, group)
        items = [item for group in groups for item in group]
        experience = make_experience_batch(items)
        if all(item.policy_version is None for item in items):
            experience.policy_version = None  # the maker sets that of its weights
        if self._reference is not None:
            self._add_reference(self._reference, experience)
        return experience

    def run(
        self, prompts: Sequence[Prompt], times: int, options: dict[str, Any]
    ) -> list[list[BufferItem]]:
        """Run `times` episodes of each prompt; return the samples of each prompt.

        If one of a prompt's episodes fails, the prompt has one sample with the reward nan.
        """
        recipe = self._recipe
        engine = LocalEngine(
            *(self._actor, options), version=self.version, timeout=recipe.episode_timeout
        )
        encoded = [{**each, "input_ids": recipe.encode(each).tolist()} for each in prompts]

        async def every() -> list[list[BufferItem] | Exception]:
            return await asyncio.gather(
                *(self._one(prompt, engine) for prompt in encoded for _ in range(times))
            )

        with evaluating(self._actor):
            found = engine.serve(every())
        groups = []
        for number, prompt in enumerate(encoded):
            results = found[number * times : (number + 1) * times]
            errors = [each for each in results if isinstance(each, Exception)]
            if errors:
                _log.warning(
                    "a group is filtered: %d of its %d episodes failed, the first with %r",
                    *(len(errors), times, errors[0]),
                )
                groups.append([_failed(prompt["input_ids"])])
                continue
            groups.append([item for each in results if isinstance(each, list) for item in each])
        return groups

    async def _one(
        self, prompt: dict[str, Any], engine: LocalEngine
    ) -> list[BufferItem] | Exception:
        """Return the samples of one episode, or the error that it raised."""
        try:
            async with asyncio.timeout(self._recipe.episode_timeout):
                found = await self._recipe.episode(prompt, engine)
            items = [found] if isinstance(found, BufferItem) else list(found)
            if not items or not all(_is_sample(item) for item in items):
                raise RecordError(
                    f"an episode returned {found!r:.80}: return samples with rewards, as "
                    "trajectory.item(reward=...) does."
                )
        except Exception as error:  # noqa: BLE001 (any error of the user's function)
            return error
        return items

    def _complete(self, prompt: Prompt, group: list[BufferItem]) -> None:
        """Give the samples of a prompt their group, its keys and their advantages."""
        recipe, name = self._recipe, next(self._names)
        rewards = torch.stack([_reward(item) for item in group])
        advantages = group_relative_advantages(
            rewards, group_size=len(group), scale_by_std=recipe.scale_by_std
        )
        for item, advantage in zip(group, advantages, strict=True):
            item.group_id = name
            if item.advantages is None:
                item.advantages = advantage
            item.extras = {**{key: prompt.get(key) for key in recipe.extras}, **item.extras}
            tags = {key: prompt[key] for key in recipe.tags if key in prompt}
            item.tags = {"maker": recipe.worker, **tags, **item.tags}

    @torch.no_grad()
    def _add_reference(self, reference: nn.Module, experience: Experience) -> None:
        """Add the reference policy's log-probabilities of the actions."""
        batch = TrainingBatch.of(experience, algorithm="GRPO")
        logits = action_logits(
            reference, batch.sequences, batch.attention_mask, batch.actions, inputs=batch.inputs
        )
        found = action_log_probs(
            logits, batch.sequences, batch.actions, temperature=self._recipe.temperature
        ).to(batch.sequences.device)
        masked = found.masked_fill(~batch.action_mask, 0.0)
        experience.tensors[REFERENCE_LOG_PROBS] = batch.stored(masked)


def rewards_of(groups: Sequence[Sequence[BufferItem]]) -> Tensor:
    """Return the rewards of all samples, float32."""
    return torch.stack([_reward(item) for group in groups for item in group])


def _reward(item: BufferItem) -> Tensor:
    return torch.as_tensor(item.reward, dtype=torch.float32).reshape(())


def _is_sample(item: object) -> bool:
    return isinstance(item, BufferItem) and item.reward is not None


def _failed(prompt: list[int]) -> BufferItem:
    """Return a sample that stands for a group that is to be filtered."""
    trajectory = Trajectory(prompt)
    trajectory.given(prompt[-1:])
    return trajectory.item(reward=math.nan)
