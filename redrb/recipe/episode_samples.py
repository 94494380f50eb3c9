"""The samples of a recipe's episodes: keys of prompts, advantages, the reference policy."""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from redrb.algorithms.batches import REFERENCE_LOG_PROBS, TrainingBatch
from redrb.algorithms.experience_makers import reference_log_probs
from redrb.episodes.groups import Episode
from redrb.errors import RecordError
from redrb.experience import BufferItem, make_experience_batch, split_experience_batch

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


def with_reference(
    reference: nn.Module, items: list[BufferItem], *, temperature: float
) -> list[BufferItem]:
    """Return samples with the reference policy's log-probabilities of their actions."""
    experience = make_experience_batch(items)
    batch = TrainingBatch.of(experience, algorithm="GRPO")
    found = reference_log_probs(reference, batch, temperature=temperature)
    experience.tensors[REFERENCE_LOG_PROBS] = found
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
