"""Prompts as padded batches, and the mean reward of a policy on held-out prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from redrb.algorithms import generate
from redrb.recipe.recipe import Prompt
from redrb.recipe.rewards import completions_of, scores

if TYPE_CHECKING:
    from redrb.recipe.language import LanguageRecipe


def padded(prompts: Sequence[Tensor], pad: int) -> dict[str, Tensor]:
    """Return prompts of different lengths as one batch, padded on the left.

    Args:
        prompts: Token ids, each int64 `[P]`.
        pad: Token for padding.

    Returns:
        `input_ids` and `attention_mask`, int64 `[len(prompts), longest P]`.
    """
    longest = max(len(prompt) for prompt in prompts)
    tokens = torch.full((len(prompts), longest), pad)
    mask = torch.zeros(len(prompts), longest, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        tokens[row, longest - len(prompt) :] = prompt
        mask[row, longest - len(prompt) :] = 1
    return {"input_ids": tokens, "attention_mask": mask}


def mean_reward(
    recipe: LanguageRecipe, actor: nn.Module, prompts: Sequence[Prompt], *, seed: int
) -> float:
    """Return the mean reward of one sampled completion of each prompt.

    Args:
        recipe: Encodes prompts and scores completions.
        actor: The policy, in eval mode.
        prompts: The prompts.
        seed: Seed of the sampling; the same weights and seed give the same reward.
    """
    device = next((parameter.device for parameter in actor.parameters()), torch.device("cpu"))
    generator = torch.Generator(device).manual_seed(seed)
    total, size = 0.0, 512
    for first in range(0, len(prompts), size):
        part = prompts[first : first + size]
        inputs = padded([recipe.encode(prompt) for prompt in part], recipe.pad_token_id)
        done = generate(actor, inputs, **recipe.generation(generator))
        total += sum(scores(recipe, completions_of(recipe, part, done)))
    return total / len(prompts)
