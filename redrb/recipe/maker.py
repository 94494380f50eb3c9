"""`RecipeMaker`: the maker of a recipe, and what the makers of all recipes share."""

from __future__ import annotations

import copy
import logging
import random
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from itertools import count, islice
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import nn

from redrb.connection import Client
from redrb.connection.deadline import Deadline
from redrb.connection.stop import Stop, checked_stop_seconds
from redrb.errors import StoreError
from redrb.experience import Experience
from redrb.recipe.dropped import Choice
from redrb.recipe.groups import RolloutGroups
from redrb.recipe.job_settings import agreed_settings
from redrb.recipe.prompts import endless
from redrb.recipe.task_settings import settings_of_maker
from redrb.scopes import closed_on_error
from redrb.stream import ExperienceStream
from redrb.train import MakerEvents, Strategy
from redrb.train.following import MakerWeights
from redrb.train.maker import Maker, maker_stream
from redrb.watch.metrics.events import Write
from redrb.weights import WeightSubscriber
from redrb.words import counted

if TYPE_CHECKING:
    from redrb.recipe.recipe import Recipe
    from redrb.recipe.served import ServedWeights


class Waiting(Protocol):
    """A maker that knows how long it has waited: for rights, and for room."""

    @property
    def admission_s(self) -> float:
        """Seconds of waiting for the right to begin groups."""

    @property
    def backpressure_s(self) -> float:
        """Seconds of waiting for room."""


class StepTimes:
    """Seconds of a maker's step, and of the waits in it: for rights, for weights, for room."""

    def __init__(self, maker: Waiting, weights: MakerWeights | ServedWeights) -> None:
        self._maker, self._weights = maker, weights
        self._before: Mapping[str, float] = {}

    def since_before(self) -> dict[str, float]:
        """Return the seconds since the call before; 0 at the first call."""
        maker, before = self._maker, self._before
        self._before = now = {
            "step_s": time.perf_counter(),
            "admission_s": maker.admission_s,
            "fetch_s": self._weights.fetch_s,
            "backpressure_s": maker.backpressure_s,
        }
        return {name: seconds - before.get(name, seconds) for name, seconds in now.items()}

    def waits(self) -> dict[str, float]:
        """Return the seconds since the call before, where only waits for room hold up sending."""
        times = self.since_before()
        return times | {"send_s": times["backpressure_s"]}


class MakerReport(MakerEvents):
    """Writes an event `put` for each step: its groups, and the times for making and sending them.

    `step_s` is the time of the whole step, loading weights included; `admission_s` the part of it
    that was a wait for the right to begin the groups; `fetch_s` the wait for new weights;
    `backpressure_s` the part of `send_s` that was a wait for room.
    """

    def __init__(self, maker: RecipeMaker, weights: MakerWeights, write: Write) -> None:
        super().__init__(write)
        self._maker, self._times = maker, StepTimes(maker, weights)
        self._groups = 0

    def on_loop_start(self) -> None:
        """Load the reference policy, and begin to measure."""
        self._maker.load_reference()
        self._times.since_before()

    def on_batch_start(self) -> None:
        """Begin to sum up the parts of a step."""
        super().on_batch_start()
        self._groups = 0

    def on_make_experience_end(self, experience: Experience) -> None:
        """Note the groups of the step."""
        super().on_make_experience_end(experience)
        self._groups += len(set(experience.group_id or ()))

    def on_batch_end(self) -> None:
        """Count the groups that failed; write the step."""
        self._maker.count_failed()
        version = self._maker.policy_version
        times = self._times.since_before()
        self._write_step(groups=self._groups, policy_version=version, **times)

    def on_loop_end(self) -> None:
        """Write the waits of a step that did not end."""
        if self._maker.stopped:
            self._write("waited", step=self._steps, **self._times.waits())


_log = logging.getLogger("redrb")

ROOM_TIMEOUT_S = 2.0
"""Longest wait for room for unsent groups after a maker was asked to end."""


class RecipeMaker(Maker):
    """Makes groups of a recipe's prompts with the newest published weights."""

    def __init__(self, client: Client, recipe: Recipe, write: Write) -> None:
        """Open the task."""
        self._recipe, self._client = recipe, client
        self._choice = Choice(recipe.reward_above, recipe.reward_below)
        stop = Stop(checked_stop_seconds("stop_timeout", recipe.stop_timeout))
        stream = task_of(client, recipe)
        with closed_on_error(stream):
            models, self._reference, generation = placed_models(recipe)
            weights = weights_of(client, recipe, models, stop)
            super().__init__(
                [stream],
                recipe.experience_maker(models, self._reference),
                weights,
                room_timeout=min(0.75 * recipe.stop_timeout, ROOM_TIMEOUT_S),
                callbacks=[MakerReport(self, weights, write)],
                generate_kwargs=generation,
            )

    def run(self) -> None:
        """Make groups until the recipe's number of steps is done, or the maker is asked to end.

        Raises:
            Any error of `ExperienceMakerHolder.workingloop`, or of the recipe.
        """
        groups, recipe = self.experience_maker, self._recipe
        stop = groups.stop if isinstance(groups, RolloutGroups) else None
        prompts = endless(recipe, random.Random(recipe.worker_seed))  # noqa: S311
        steps = range(recipe.maker_steps) if recipe.maker_steps else count()
        with self._stop.waking(stop) if stop else nullcontext():
            self._run(list(islice(prompts, recipe.prompts_per_step)) for _ in steps)

    def close(self, *, timeout: float = 60.0) -> None:
        """Send the remaining groups and close; a first SIGTERM does not break this off."""
        with self._stop.on_signals():
            super().close(timeout=timeout)

    def load_reference(self) -> None:
        """Load the reference policy, if there is one."""
        if self._reference is not None:
            load_reference(self._client, self._recipe, self._reference)

    def _made(self, inputs: Any) -> Iterator[Experience]:
        """Yield the groups that are trained; the others are counted with the failed ones."""
        for experience in super()._made(inputs):
            yield from self._choice.kept(experience) if self._recipe.drops_groups else [experience]

    def count_failed(self) -> None:
        """Count groups that could not be made, or were not chosen, as filtered."""
        failed, self._choice.dropped = self._choice.dropped, 0
        if isinstance(self.experience_maker, RolloutGroups):
            failed += self.experience_maker.take_failed()
        try:
            with Deadline(stop=self._stop):
                self._streams[0].discard_filtered(failed)
        except StoreError as error:
            _log.warning("%s may not be counted: %s", counted(failed, "filtered group"), error)


def task_of(client: Client, recipe: Recipe) -> ExperienceStream:
    """Open the task of a recipe for a maker, which is announced."""
    return maker_stream(
        client,
        recipe.task_name,
        recipe.worker,
        namespace=recipe.namespace,
        lease_ms=recipe.lease_ms,
        implied=settings_of_maker(client, recipe),
    )


def weights_of(
    client: Client, recipe: Recipe, models: Mapping[str, nn.Module], stop: Stop
) -> MakerWeights:
    """Return the weights that a maker of a recipe follows."""
    return MakerWeights(
        client,
        recipe.namespace,
        recipe.worker,
        models,
        stop,
        follow=recipe.weights_name,
        first_timeout=recipe.weights_timeout,
        in_flight=recipe.in_flight_updates,
        agree=agreed_settings(recipe),
    )


def placed_models(
    recipe: Recipe,
) -> tuple[dict[str, nn.Module], nn.Module | None, dict[str, Any]]:
    """Seed this process; return a maker's models, its reference policy, and options of generation.

    The models have no weights of the job yet.
    """
    seed_everything(recipe.worker_seed)
    strategy = Strategy(recipe.device or None)
    models = recipe.models()
    like = recipe.reference(models)
    reference = None if like is None else copy.deepcopy(like).requires_grad_(requires_grad=False)
    placed = {name: strategy.prepare(model) for name, model in models.items()}
    generator = torch.Generator(strategy.device).manual_seed(recipe.worker_seed)
    return placed, strategy.prepare(reference), recipe.generation(generator)


def load_reference(client: Client, recipe: Recipe, reference: nn.Module) -> None:
    """Load the reference policy, or raise WeightTimeout if no trainer publishes it in time."""
    weights = WeightSubscriber(client, recipe.reference_name, namespace=recipe.namespace)
    weights.wait(newer_than=0, timeout=recipe.weights_timeout)
    weights.poll(reference)


def seed_everything(seed: int) -> None:
    """Seed the global random numbers of Python, numpy and torch, for the code of recipes."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
