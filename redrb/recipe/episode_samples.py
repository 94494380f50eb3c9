"""The samples of a recipe's episodes: keys of prompts, advantages, the reference policy."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from redrb.algorithms import group_relative_advantages
from redrb.algorithms.batches import REFERENCE_LOG_PROBS, TrainingBatch
from redrb.algorithms.log_probs import action_log_probs
from redrb.algorithms.models import action_logits
from redrb.episodes.groups import Episode
from redrb.errors import RecordError
from redrb.experience import BufferItem, make_experience_batch, split_experience_batch
from redrb.experience.faults import Fault, log_filtered
from redrb.recipe.groups import group_names
from redrb.recipe.local_engine import LocalEngine

if TYPE_CHECKING:
    from redrb.recipe.episodes import EpisodeRecipe
    from redrb.recipe.recipe import Prompt


def encoded_prompt(recipe: EpisodeRecipe, prompt: Prompt) -> dict[str, Any]:
    """Return a prompt as episodes get it: its keys, and its tokens as `input_ids`."""
    return {**prompt, "input_ids": recipe.encode(prompt).tolist()}


def episode_of(recipe: EpisodeRecipe) -> Episode:
    """Return the recipe's episode with its time limit, and with the prompt's keys in its samples.

    It has the parameter `partial` if the recipe's episode has it.
    """

    @functools.wraps(recipe.episode)
    async def episode(prompt: dict[str, Any], *arguments: Any, **partial: Any) -> list[BufferItem]:
        async with asyncio.timeout(recipe.episode_timeout):
            found = await recipe.episode(prompt, *arguments, **partial)
        items = [found] if isinstance(found, BufferItem) else list(found)
        for item in items:
            if not isinstance(item, BufferItem):
                raise RecordError(
                    f"an episode returned {found!r:.80}: return samples with rewards, as "
                    "trajectory.item(reward=...) does."
                )
            item.extras = {**{key: prompt.get(key) for key in recipe.extras}, **item.extras}
            tags = {key: prompt[key] for key in recipe.tags if key in prompt}
            item.tags = {"maker": recipe.worker, **tags, **item.tags}
        return items

    return episode


class GroupFinisher:
    """Completes the samples of a group: its name, its advantages, the reference policy."""

    def __init__(
        self,
        recipe: EpisodeRecipe,
        reference: nn.Module | None,
        engine: LocalEngine,
        finished: Callable[[list[BufferItem]], None],
    ) -> None:
        """Make it.

        Args:
            finished: Called with each group that is complete.
        """
        self._recipe, self._reference = recipe, reference
        self._engine, self._report = engine, finished
        self._names = group_names(recipe)

    async def finish(self, items: list[BufferItem]) -> list[BufferItem] | None:
        """Return the complete group; None, to filter it, if a reward is no number.

        Raises:
            RecordError: A sample has no reward.
        """
        rewards = torch.stack([reward_of(item) for item in items])
        if not rewards.isfinite().all():
            fault = Fault("the reward", "of an episode is nan or infinite", "episode reward")
            log_filtered(fault, "a group is filtered: its rewards are %s", rewards.tolist())
            return None
        name = next(self._names)
        advantages = group_relative_advantages(
            rewards, group_size=len(items), scale_by_std=self._recipe.scale_by_std
        )
        for item, advantage in zip(items, advantages, strict=True):
            item.group_id = name
            if item.advantages is None:
                item.advantages = advantage
        if self._reference is not None:
            reference = self._reference
            items = await self._engine.call(lambda: self._with_reference(reference, items))
        self._report(items)
        return items

    @torch.no_grad()
    def _with_reference(self, reference: nn.Module, items: list[BufferItem]) -> list[BufferItem]:
        """Return samples with the reference policy's log-probabilities of their actions."""
        experience = make_experience_batch(items)
        batch = TrainingBatch.of(experience, algorithm="GRPO")
        logits = action_logits(
            reference, batch.sequences, batch.attention_mask, batch.actions, inputs=batch.inputs
        )
        found = action_log_probs(
            logits, batch.sequences, batch.actions, temperature=self._recipe.temperature
        ).to(batch.sequences.device)
        masked = found.masked_fill(~batch.action_mask, 0.0)
        experience.tensors[REFERENCE_LOG_PROBS] = batch.stored(masked)
        return split_experience_batch(experience)


def reward_of(item: BufferItem) -> Tensor:
    """Return the reward of a sample, float32.

    Raises:
        RecordError: It has none.
    """
    if item.reward is None:
        raise RecordError(
            "a sample of an episode has no reward: return trajectory.item(reward=...)."
        )
    return torch.as_tensor(item.reward, dtype=torch.float32).reshape(())
