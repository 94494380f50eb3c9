"""Evaluations of a policy: completions or episodes of held-out prompts, without a task."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, nn

from redrb.algorithms import Reward, generate
from redrb.algorithms.models import device_of
from redrb.algorithms.user_functions import GRACE_S, submit
from redrb.errors import ConfigError
from redrb.recipe.episode_maker import encoded_prompt, episode_of, reward_of
from redrb.recipe.local_engine import LocalEngine, Turn, sampled_turns
from redrb.recipe.prompts import prompt_batch
from redrb.train.engines import Generation
from redrb.train.episodes.groups import EpisodeRunner
from redrb.train.world import group_device, rank_here, world_size_here

if TYPE_CHECKING:
    from redrb.recipe.episodes import EpisodeRecipe
    from redrb.recipe.language import LanguageRecipe
    from redrb.recipe.recipe import Prompt

EVALUATION_SEED = 7
"""Seed of the completions of held-out prompts: the same weights always have the same score."""

EVALUATED_TOGETHER = 512
"""Most held-out prompts in one batch."""


def evaluation_of(found: Sequence[tuple[float, str]]) -> dict[str, Any]:
    """Return the metrics of an evaluation.

    Returns:
        `reward`, the mean of the rewards that are there, None if there is none; `samples` and
        `failed`, how many prompts have a reward and how many have none; with failed ones
        `why_failed`, their most frequent reason.
    """
    rewards = [reward for reward, why in found if not why]
    reasons = Counter(why for _, why in found if why)
    metrics: dict[str, Any] = {
        "reward": sum(rewards) / len(rewards) if rewards else None,
        "samples": len(rewards),
        "failed": reasons.total(),
    }
    if reasons:
        [(metrics["why_failed"], _)] = reasons.most_common(1)
    return metrics


def evaluated(
    recipe: LanguageRecipe, actor: nn.Module, prompts: Sequence[Prompt], reward: Reward
) -> dict[str, Any]:
    """Return the metrics of one sampled completion of each prompt, as `evaluation_of` does."""
    generator = torch.Generator(device_of(actor) or "cpu").manual_seed(EVALUATION_SEED)
    found: list[tuple[float, str]] = []
    for first in range(0, len(prompts), EVALUATED_TOGETHER):
        batch = prompt_batch(recipe, prompts[first : first + EVALUATED_TOGETHER])
        found += reward.of_each(generate(actor, batch, **recipe.generation(generator)))
    return evaluation_of(found)


def evaluated_episodes(
    recipe: EpisodeRecipe, actor: nn.Module, prompts: Sequence[Prompt]
) -> dict[str, Any] | None:
    """Return the metrics of an episode of each prompt, as `evaluation_of` does.

    All ranks of a sharded model call it together: episodes run on the first one, and the others,
    which return None, compute with it.

    Raises:
        ConfigError: An episode blocks its event loop.
    """
    generator = torch.Generator(device_of(actor) or "cpu").manual_seed(EVALUATION_SEED)
    options = recipe.generation(generator)
    if not recipe.shard or world_size_here() == 1:
        return _evaluated(recipe, lambda turns: sampled_turns(actor, turns, options), prompts)

    def of_first_rank(turns: Sequence[Turn]) -> Sequence[Turn]:
        """Return the turns of the first rank, on all ranks; none are the end."""
        sent = [turns]
        distributed.broadcast_object_list(sent, 0, device=group_device())
        return sent[0]

    if rank_here() != 0:
        while turns := of_first_rank(()):
            sampled_turns(actor, turns, options)
        return None
    try:
        return _evaluated(
            recipe, lambda turns: sampled_turns(actor, of_first_rank(turns), options), prompts
        )
    finally:
        of_first_rank(())


def _evaluated(
    recipe: EpisodeRecipe,
    sample: Callable[[Sequence[Turn]], list[Generation]],
    prompts: Sequence[Prompt],
) -> dict[str, Any]:
    engine = LocalEngine(sample, max_new_tokens=recipe.max_new_tokens)
    runner = EpisodeRunner(episode_of(recipe, recipe.episode, recipe.episode_timeout), engine)
    encoded = [encoded_prompt(recipe, prompt) for prompt in prompts]

    async def reward(prompt: dict[str, Any]) -> tuple[float, str]:
        try:
            items = await runner.run(prompt)
            found = float(torch.stack([reward_of(item) for item in items]).mean())
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 (the user's episode)
            return math.nan, f"raised {type(error).__name__}: {error!s:.200}"
        return (found, "") if math.isfinite(found) else (math.nan, f"is {found}")

    async def rewards() -> list[tuple[float, str]]:
        async with engine:
            return await asyncio.gather(*map(reward, encoded))

    return evaluation_of(_result(submit(rewards()), engine, recipe.episode_timeout + GRACE_S))


def _result(
    future: Future[list[tuple[float, str]]], engine: LocalEngine, most_s: float
) -> list[tuple[float, str]]:
    while True:
        before = engine.batches
        try:
            return future.result(most_s)
        except TimeoutError:
            if engine.batches == before and not engine.sampling:
                future.cancel()
                raise ConfigError(
                    f"no episode went on within {most_s:.0f} s: it blocks its event loop, so await "
                    "what takes long."
                ) from None
