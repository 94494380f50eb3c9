"""`EpisodeRecipeMaker`: the maker of an `EpisodeRecipe`, on `EpisodeMaker`."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Self

import torch

from redrb.algorithms.generation import SamplingEnded
from redrb.algorithms.models import evaluating
from redrb.connection import Client
from redrb.connection.deadline import Deadline
from redrb.engines import Generation
from redrb.episodes import EpisodeMaker
from redrb.experience import BufferItem
from redrb.metrics.events import Write
from redrb.recipe.episode_samples import GroupFinisher, encoded_prompt, episode_of
from redrb.recipe.job_settings import agreed_settings
from redrb.recipe.local_engine import LocalEngine, Turn, sampled_turns
from redrb.recipe.maker import reference_policy, seed_everything
from redrb.recipe.prompts import endless
from redrb.recipe.task_settings import settings_of_maker
from redrb.runtime import Strategy
from redrb.runtime.following import MakerWeights
from redrb.runtime.strategy import place_models
from redrb.stream import ExperienceStream

if TYPE_CHECKING:
    from redrb.recipe.episodes import EpisodeRecipe


class EpisodeReport:
    """Writes an event `put` whenever as many groups as a step has prompts are made.

    `step_s` is the time since the event before; `admission_s` the part of it in which the maker had
    no group and waited for the right to begin one; `fetch_s` the wait for new weights;
    `backpressure_s` the time for which groups waited for room, which does not hold up the others.
    """

    def __init__(self, maker: EpisodeRecipeMaker, groups: int, write: Write) -> None:
        self._maker, self._each, self._write = maker, groups, write
        self._steps = self._groups = 0
        self._rewards: list[float] = []
        self._before = (0.0, 0.0, 0.0, 0.0)

    def add_group(self, items: list[BufferItem]) -> None:
        """Count a complete group; write the step if it is the last of one."""
        if not any(self._before):
            self._before = (time.perf_counter(), 0.0, 0.0, 0.0)
        self._groups += 1
        self._rewards += [float(item.reward) for item in items if item.reward is not None]
        if self._groups == self._each:
            self._write_step()

    def _write_step(self) -> None:
        maker, rewards = self._maker, self._rewards
        before = self._before
        now = (time.perf_counter(), maker.admission_s, maker.backpressure_s, maker.fetch_s)
        step_s, admission_s, backpressure_s, fetch_s = (
            new - old for new, old in zip(now, before, strict=True)
        )
        self._steps += 1
        self._write(
            "put",
            step=self._steps,
            step_s=step_s,
            admission_s=admission_s,
            fetch_s=fetch_s,
            groups=self._groups,
            samples=len(rewards),
            policy_version=maker.policy_version,
            reward=sum(rewards) / len(rewards),
            send_s=backpressure_s,
            backpressure_s=backpressure_s,
        )
        self._groups, self._rewards, self._before = 0, [], now


DRAIN_TIMEOUT_S = 10.0
"""Longest time that episodes get to return after a maker was asked to end."""


class EpisodeRecipeMaker(EpisodeMaker):
    """Runs a recipe's episodes with a model in this process, which has the newest weights.

    Weights change between two batches of turns, and with `in_flight_updates` between two tokens.
    """

    def __init__(self, client: Client, recipe: EpisodeRecipe, write: Write) -> None:
        """Open the task, and wait for the reference policy, if there is one.

        Raises:
            WeightTimeout: No trainer published weights in time.
        """
        self._recipe = recipe
        seed_everything(recipe.worker_seed)
        stream = ExperienceStream(
            *(client, recipe.task_name),
            namespace=recipe.namespace,
            lease_ms=recipe.lease_ms,
            on_bad_group="drop",
            implied=settings_of_maker(client, recipe),
        )
        stream.worker.label = recipe.worker
        stream.worker.weights_name = recipe.weights_name
        stream.worker.begins()
        with ExitStack() as undo:
            undo.callback(stream.close)
            reference = self._place_models(client, stream)
            self._local = LocalEngine(self._sample, max_new_tokens=recipe.max_new_tokens)
            report = EpisodeReport(self, recipe.prompts_per_step, write)
            finisher = GroupFinisher(recipe, reference, self._local, report.add_group)
            super().__init__(
                *(stream, episode_of(recipe), self._local),
                group_size=recipe.group_size,
                groups=recipe.prompts_per_step,
                finish=finisher.finish,
                resume=stream.settings().values.get("order") != "admission",
                drain_timeout=min(DRAIN_TIMEOUT_S, recipe.stop_timeout / 2),
                stop_timeout=recipe.stop_timeout,
            )
            self._weights = self._followed = MakerWeights(
                *(client, recipe.namespace, recipe.worker, self._models, self._stop),
                follow=recipe.weights_name,
                first_timeout=recipe.weights_timeout,
                in_flight=recipe.in_flight_updates,
                agree=agreed_settings(recipe),
            )
            undo.pop_all()

    def _place_models(self, client: Client, stream: ExperienceStream) -> Any:
        """Make the models; wait for the reference policy and return it; None: there is none."""
        recipe = self._recipe
        strategy = Strategy(recipe.device or None)
        models = recipe.models()
        waiting = partial(stream.worker.waiting, "weights")
        reference = reference_policy(client, recipe, models, waiting)
        placed = place_models(lambda: strategy, lambda: (*models.values(), reference), None)
        self._models = dict(zip(models, placed.models[:-1], strict=True))
        generator = torch.Generator(strategy.device).manual_seed(recipe.worker_seed)
        self._generation = recipe.generation(generator)
        return placed.models[-1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with Deadline(budget=self._stop):
            self._stream.close()

    @property
    def policy_version(self) -> int | None:
        """Version of the weights in the models; None before the first ones."""
        return self._followed.version

    @property
    def fetch_s(self) -> float:
        """Seconds for which sampling has waited for new weights, after the first ones."""
        return self._followed.fetch_s

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
        with evaluating(*self._models.values()):
            super().run(prompts)

    def _sample(self, turns: Sequence[Turn]) -> list[Generation]:
        """Sample a batch of turns with the newest weights; an error ends the maker."""
        try:
            weights = self._followed
            weights.refresh(self.right_version)
            with weights.updates.exclusive():
                version, options = weights.begin_batch()
                newest = options.get("before_token", lambda: version)

                def before_token() -> int | None:
                    if self._local.ended:
                        raise SamplingEnded
                    found: int | None = newest()
                    return found

                generation = {**self._generation, "before_token": before_token}
                return sampled_turns(self._models["actor"], turns, generation)
        except Exception as error:
            self.fail(error)
            raise
