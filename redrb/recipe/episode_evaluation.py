"""The evaluation of an `EpisodeRecipe`: an episode of each held-out prompt, without a task."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from redrb.algorithms.calls import GRACE_S, submit
from redrb.algorithms.models import device_of
from redrb.engines import Generation
from redrb.episodes.group import EpisodeRunner
from redrb.errors import ConfigError
from redrb.recipe.episode_samples import encoded_prompt, episode_of, reward_of
from redrb.recipe.evaluation import evaluation_of
from redrb.recipe.language import EVALUATION_SEED
from redrb.recipe.local_engine import LocalEngine
from redrb.recipe.recipe import Prompt
from redrb.recipe.turns import Turn, sampled_turns
from redrb.runtime.world import rank_here, world_size_here

if TYPE_CHECKING:
    from redrb.recipe.episodes import EpisodeRecipe

from torch import Tensor, distributed

from redrb.runtime.world import group_device


def send_turns(turns: Sequence[Turn]) -> None:
    """Send a batch to the other ranks, which call `received_turns`; an empty one is the end."""
    numbers: list[int] = []
    for turn in turns:
        numbers += [turn.max_new_tokens, len(turn.stop), len(turn.tokens), *turn.stop, *turn.tokens]
    _broadcast(torch.tensor([len(numbers)], dtype=torch.int64))
    if numbers:
        _broadcast(torch.tensor(numbers, dtype=torch.int64))


def received_turns() -> list[Turn]:
    """Return the next batch of the first rank; empty at the end."""
    count = int(_broadcast(torch.zeros(1, dtype=torch.int64)))
    if not count:
        return []
    numbers = _broadcast(torch.zeros(count, dtype=torch.int64)).tolist()
    turns, at = [], 0
    while at < count:
        most, stops, length = numbers[at : at + 3]
        first = at + 3 + stops
        turns.append(Turn(numbers[first : first + length], most, tuple(numbers[at + 3 : first])))
        at = first + length
    return turns


def _broadcast(tensor: Tensor) -> Tensor:
    tensor = tensor.to(group_device())
    distributed.broadcast(tensor, 0)
    return tensor


def evaluated_episodes(
    recipe: EpisodeRecipe, actor: nn.Module, prompts: Sequence[Prompt]
) -> dict[str, Any] | None:
    """Return the metrics of an episode of each prompt, as `evaluation_of` does.

    All ranks of a sharded model call it together: episodes run on the first one, and the others,
    which return None, compute with it.

    Args:
        recipe: Its settings and its episode.
        actor: The policy, in eval mode.
        prompts: The prompts.

    Raises:
        ConfigError: An episode blocks its event loop.
    """
    generator = torch.Generator(device_of(actor) or "cpu").manual_seed(EVALUATION_SEED)
    options = recipe.generation(generator)
    if not recipe.shard or world_size_here() == 1:
        return _evaluated(recipe, lambda turns: sampled_turns(actor, turns, options), prompts)
    if rank_here() != 0:
        while turns := received_turns():
            sampled_turns(actor, turns, options)
        return None

    def sample(turns: Sequence[Turn]) -> list[Generation]:
        send_turns(turns)
        return sampled_turns(actor, turns, options)

    try:
        return _evaluated(recipe, sample, prompts)
    finally:
        send_turns(())


def _evaluated(
    recipe: EpisodeRecipe,
    sample: Callable[[Sequence[Turn]], list[Generation]],
    prompts: Sequence[Prompt],
) -> dict[str, Any]:
    engine = LocalEngine(sample, max_new_tokens=recipe.max_new_tokens)
    runner = EpisodeRunner(episode_of(recipe), engine)
    encoded = [encoded_prompt(recipe, prompt) for prompt in prompts]

    async def rewards() -> list[float | BaseException]:
        async with engine:
            return await asyncio.gather(
                *(_reward(runner, prompt) for prompt in encoded), return_exceptions=True
            )

    found = _result(submit(rewards()), engine, recipe.episode_timeout + GRACE_S)
    return evaluation_of([_reward_or_reason(each) for each in found])


def _reward_or_reason(found: float | BaseException) -> tuple[float, str]:
    """Return the reward of an episode and "", or nan and why it has none."""
    if isinstance(found, BaseException):
        return math.nan, f"raised {type(found).__name__}: {found!s:.200}"
    return (found, "") if math.isfinite(found) else (math.nan, f"is {found}")


async def _reward(runner: EpisodeRunner, prompt: dict[str, Any]) -> float:
    items = await runner.run(prompt)
    return float(torch.stack([reward_of(item) for item in items]).mean())


def _result(
    future: Future[list[float | BaseException]], engine: LocalEngine, most_s: float
) -> list[float | BaseException]:
    """Wait for the episodes, as long as some go on."""
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
