"""A recipe's prompts as padded batches, its rewards, and the evaluation of a policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from redrb.algorithms import Completion as Completion  # for `redrb.recipe`
from redrb.algorithms import generate
from redrb.algorithms.reward import Reward
from redrb.recipe.evaluation import evaluation_of
from redrb.recipe.recipe import Prompt

if TYPE_CHECKING:
    from redrb.recipe.language import LanguageRecipe

EVALUATED_TOGETHER = 512
"""Most held-out prompts in one batch."""


def prompt_batch(recipe: LanguageRecipe, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Return prompts as one batch, padded on the left.

    Returns:
        `input_ids` and `attention_mask`, int64 `[len(prompts), longest P]`; and each further key of
        the prompts, as a list, or as one tensor if the entries are tensors of one shape. A prompt
        without a key has None there.
    """
    batch: dict[str, Any] = padded([recipe.encode(each) for each in prompts], recipe.pad_token_id)
    keys = dict.fromkeys(key for prompt in prompts for key in prompt if key not in batch)
    return batch | {key: _together([prompt.get(key) for prompt in prompts]) for key in keys}


def padded(prompts: Sequence[Tensor], pad: int) -> dict[str, Tensor]:
    """Return token ids of different lengths as one batch, padded on the left.

    Args:
        prompts: Token ids, each int64 `[P]`.
        pad: Token for padding.
    """
    longest = max(len(prompt) for prompt in prompts)
    tokens = torch.full((len(prompts), longest), pad)
    mask = torch.zeros(len(prompts), longest, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        tokens[row, longest - len(prompt) :] = prompt
        mask[row, longest - len(prompt) :] = 1
    return {"input_ids": tokens, "attention_mask": mask}


def reward_of(recipe: LanguageRecipe) -> Reward:
    """Return the rewards of a recipe: `rewards` for all completions if it has it, else `reward`."""
    from redrb.recipe.language import LanguageRecipe

    if type(recipe).rewards is not LanguageRecipe.rewards:
        return Reward(recipe.rewards, decode=recipe.decode, batched=True)
    return Reward(recipe.reward, decode=recipe.decode)


def evaluated(
    recipe: LanguageRecipe, actor: nn.Module, prompts: Sequence[Prompt], *, seed: int
) -> dict[str, Any]:
    """Return the metrics of one sampled completion of each prompt, as `evaluation_of` does.

    Args:
        recipe: Encodes prompts and scores completions.
        actor: The policy, in eval mode.
        prompts: The prompts.
        seed: Seed of the sampling; the same weights and seed give the same reward.
    """
    device = next((parameter.device for parameter in actor.parameters()), torch.device("cpu"))
    generator = torch.Generator(device).manual_seed(seed)
    reward, found = reward_of(recipe), []
    for first in range(0, len(prompts), EVALUATED_TOGETHER):
        batch = prompt_batch(recipe, prompts[first : first + EVALUATED_TOGETHER])
        found += reward.of_each(generate(actor, batch, **recipe.generation(generator)))
    return evaluation_of(found)


def _together(values: list[Any]) -> Any:
    if all(isinstance(value, Tensor) and value.shape == values[0].shape for value in values):
        return torch.stack(values)
    return values
