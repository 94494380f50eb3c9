"""`EpisodeRecipeMaker`: makes episodes of a recipe, or completions by a server; its samples."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence
from functools import partial, wraps
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from redrb.algorithms import group_relative_advantages
from redrb.algorithms.batches import REFERENCE_LOG_PROBS, TrainingBatch
from redrb.algorithms.experience_makers import RAW_REWARD, reference_log_probs
from redrb.algorithms.generation import SamplingEnded
from redrb.algorithms.models import evaluating
from redrb.connection import Client
from redrb.connection.deadline import Deadline
from redrb.errors import RecordError
from redrb.experience import BufferItem, make_experience_batch, split_experience_batch
from redrb.experience.faults import Fault, log_filtered
from redrb.recipe.dropped import Choice
from redrb.recipe.groups import group_names
from redrb.recipe.local_engine import LocalEngine, Turn, sampled_turns
from redrb.recipe.maker import (
    StepTimes,
    Waiting,
    load_reference,
    placed_models,
    task_of,
    weights_of,
)
from redrb.recipe.prompts import endless
from redrb.recipe.served import PROMPT_KEYS, ServedEngine, ServedWeights, scored
from redrb.scopes import Entered, closed_on_error
from redrb.train.engines import Generation, Trajectory
from redrb.train.episodes import EpisodeMaker
from redrb.train.episodes.groups import Episode, samples_of
from redrb.train.following import MakerWeights
from redrb.watch.metrics.events import Write

if TYPE_CHECKING:
    from redrb.recipe.language import GRPORecipe
    from redrb.recipe.recipe import Prompt


def encoded_prompt(recipe: GRPORecipe, prompt: Prompt) -> dict[str, Any]:
    """Return a prompt as episodes get it: its keys, and its tokens as `input_ids`."""
    return {**prompt, "input_ids": recipe.encode(prompt).tolist()}


def episode_of(
    recipe: GRPORecipe, of_recipe: Callable[..., Any], most_s: float | None = None
) -> Episode:
    """Return the recipe's episode with its time limit, and with the prompt's keys in its samples.

    It has the parameter `partial` if the recipe's episode has it.
    """

    @wraps(of_recipe)
    async def episode(prompt: dict[str, Any], *arguments: Any, **partial: Any) -> list[BufferItem]:
        async with asyncio.timeout(most_s):
            found = await of_recipe(prompt, *arguments, **partial)
        items = samples_of(found, "an episode")
        for item in items:
            item.extras = {**{key: prompt.get(key) for key in recipe.extras}, **item.extras}
            tags = {key: prompt[key] for key in recipe.tags if key in prompt}
            item.tags = {"maker": recipe.worker, **tags, **item.tags}
        return items

    return episode


async def completion(prompt: dict[str, Any], engine: ServedEngine) -> BufferItem:
    """Sample one completion of a prompt."""
    trajectory = Trajectory(prompt["input_ids"])
    trajectory.sampled(await engine.generate(trajectory.tokens))
    keys = {key: value for key, value in prompt.items() if key != "input_ids"}
    return trajectory.item(extras={PROMPT_KEYS: keys})


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


class EpisodeReport:
    """Writes an event `put` whenever as many groups as a step has prompts are made.

    `step_s` is the time since the event before; `admission_s` the part of it in which the maker had
    no group and waited for the right to begin one; `fetch_s` the wait for new weights;
    `backpressure_s` the time for which groups waited for room, which does not hold up the others.
    """

    def __init__(
        self,
        maker: Waiting,
        weights: MakerWeights | ServedWeights,
        groups: int,
        write: Write,
    ) -> None:
        self._weights, self._each, self._write = weights, groups, write
        self._times = StepTimes(maker, weights)
        self._steps = self._groups = 0
        self._rewards: list[float] = []

    def add_group(self, rewards: Sequence[float]) -> None:
        """Count a complete group, with its samples' rewards; write the step if it is the last."""
        if not self._steps and not self._groups:
            self._times.since_before()
        self._groups += 1
        self._rewards += rewards
        if self._groups < self._each:
            return
        self._steps += 1
        times, made = self._times.waits(), self._rewards
        self._write(
            "put",
            step=self._steps,
            groups=self._groups,
            samples=len(made),
            policy_version=self._weights.version,
            reward=sum(made) / len(made),
            **times,
        )
        self._groups, self._rewards = 0, []

    def end(self) -> None:
        """Write the waits of a step that did not end."""
        self._write("waited", step=self._steps, **self._times.waits())


DRAIN_TIMEOUT_S = 10.0
"""Longest time that episodes get to return after a maker was asked to end."""


class EpisodeRecipeMaker(EpisodeMaker, Entered):
    """Runs a recipe's episodes with the newest weights, in this process or on its server.

    In this process weights change between two batches of turns, and with `in_flight_updates`
    between two tokens; on a server at once. A recipe without episodes samples completions.
    """

    def __init__(
        self, client: Client, recipe: GRPORecipe, write: Write, episode: Episode | None = None
    ) -> None:
        """Open the task; without an episode, completions are scored together with their group."""
        self._client, self._recipe, self._overlong = client, recipe, recipe.overlong
        self._choice = Choice(recipe.reward_above, recipe.reward_below)
        stream = task_of(client, recipe)
        stream.worker.weights_name = recipe.weights_name
        with closed_on_error(stream):
            self._models: dict[str, nn.Module] = {}
            self._reference: nn.Module | None = None
            is_local = recipe.engine == "local"
            if is_local or recipe.beta > 0:
                self._models, self._reference, self._generation = placed_models(recipe)
            self._is_loaded = False  # the reference policy
            self._sampler: LocalEngine | ServedEngine
            if is_local:
                self._sampler = LocalEngine(self._sample, max_new_tokens=recipe.max_new_tokens)
            else:
                self._sampler = ServedEngine(recipe)
            self._reward = None if episode else recipe.scorer()
            self._names = group_names(recipe)
            super().__init__(
                stream,
                episode or episode_of(recipe, completion),
                self._sampler,
                group_size=recipe.group_size,
                groups=recipe.prompts_per_step,
                finish=self._finish,
                resume=stream.settings().values.get("order") != "admission",
                drain_timeout=min(DRAIN_TIMEOUT_S, recipe.stop_timeout / 2),
                stop_timeout=recipe.stop_timeout,
            )
            weights: MakerWeights | ServedWeights
            if isinstance(self._sampler, ServedEngine):
                weights = ServedWeights(client, recipe, self._sampler.server, self.fail)
            else:
                weights = self._followed = weights_of(client, recipe, self._models, self._stop)
            self._weights = weights
            self._report = EpisodeReport(self, weights, recipe.prompts_per_step, write)

    def __exit__(self, *_: object) -> None:
        if isinstance(self._weights, ServedWeights):
            self._weights.close()
        with Deadline(budget=self._stop):
            self._stream.close()

    def run(self, prompts: Iterable[Any] | None = None) -> None:
        """Make groups until the recipe's number of steps is done, or the maker is asked to end.

        Args:
            prompts: The prompts; default: the recipe's.

        Raises:
            Any error of the recipe or of sampling.
        """
        recipe = self._recipe
        if prompts is None:
            most = recipe.maker_steps * recipe.prompts_per_step or None
            drawn = endless(recipe, random.Random(recipe.worker_seed))  # noqa: S311
            prompts = (encoded_prompt(recipe, prompt) for prompt in islice(drawn, most))
        try:
            with evaluating(*self._models.values()):
                super().run(prompts)
        finally:
            if self.stopped:
                self._report.end()

    async def _finish(self, items: list[BufferItem]) -> list[BufferItem] | None:
        """Return the complete group; None, to filter it, if a reward is no number or out of bounds.

        Raises:
            RecordError: A sample has no reward.
        """
        recipe = self._recipe
        if self._reward is not None:
            await asyncio.to_thread(scored, items, self._reward, recipe.ends)
        rewards = torch.stack([reward_of(item) for item in items])
        if not rewards.isfinite().all():
            if self._reward is not None:  # it has said why
                return None
            fault = Fault("the reward", "of an episode is nan or infinite", "episode reward")
            log_filtered(fault, "a group is filtered: its rewards are %s", rewards.tolist())
            return None
        noted = self._choice.extras(rewards)
        if self._overlong is not None:
            actions: list[Any] = [item.action_log_probs for item in items]
            raw = rewards
            rewards = raw + self._overlong(torch.tensor([len(each) for each in actions]))
            for item, *both in zip(items, rewards, raw, strict=True):
                item.reward, item.tensors[RAW_REWARD] = both
        if noted is None:
            self._report.add_group(rewards.tolist())
            return None
        items[0].extras |= noted
        name = next(self._names)
        advantages = group_relative_advantages(
            rewards,
            group_size=len(items),
            scale_by_std=recipe.scale_by_std,
            method=recipe.advantages,  # type: ignore[arg-type]
        )
        for item, advantage in zip(items, advantages, strict=True):
            item.group_id = name
            if item.advantages is None:
                item.advantages = advantage
        if self._reference is not None:
            items = await self._sampler.call(partial(self._with_reference, self._reference, items))
        self._report.add_group(rewards.tolist())
        return items

    def _with_reference(self, reference: nn.Module, items: list[BufferItem]) -> list[BufferItem]:
        """Return samples with the log-probabilities of the reference policy; an error ends all."""
        try:
            if not self._is_loaded:
                load_reference(self._client, self._recipe, reference)
            self._is_loaded = True
            return with_reference(reference, items, temperature=self._recipe.temperature)
        except Exception as error:
            self.fail(error)
            raise

    def _sample(self, turns: Sequence[Turn]) -> list[Generation]:
        """Sample a batch of turns with the newest weights; an error ends the maker."""
        try:
            weights = self._followed
            weights.refresh(self.right_version)
            with weights.models.exclusive():
                version, options = weights.begin_batch()
                newest = options.get("before_token", lambda: version)

                def before_token() -> int | None:
                    if self._sampler.ended:
                        raise SamplingEnded
                    found: int | None = newest()
                    return found

                generation = {**self._generation, "before_token": before_token}
                return sampled_turns(self._models["actor"], turns, generation)
        except Exception as error:
            self.fail(error)
            raise
