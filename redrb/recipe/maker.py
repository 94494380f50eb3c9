"""`RecipeMaker`: the maker of a recipe, on `ExperienceMakerHolder`."""

from __future__ import annotations

import copy
import logging
import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from redrb.connection import Client
from redrb.connection.deadline import Deadline
from redrb.errors import StoreError
from redrb.experience import Experience
from redrb.metrics.events import Write
from redrb.recipe.agreed_settings import agreed_settings
from redrb.recipe.prompts import prompt_batches
from redrb.recipe.recipe import Prompt, Recipe
from redrb.recipe.rollouts import RolloutGroups
from redrb.recipe.task_settings import settings_of_maker
from redrb.runtime import ExperienceMaker, ExperienceMakerHolder, MakerCallback, Strategy
from redrb.runtime.agreement import Agreement
from redrb.weights import WeightSubscriber


class MakerReport(MakerCallback):
    """Writes an event `put` for each step: its groups, and the times for making and sending them.

    `step_s` is the time of the whole step, loading weights included; `admission_s` the part of it
    that was a wait for the right to begin the groups; `fetch_s` the wait for new weights; `send_s`
    the time for which sending blocked the loop, and `backpressure_s` the part of it that was a wait
    for room. Groups that are sent in several parts are summed up.
    """

    def __init__(self, maker: ExperienceMakerHolder, write: Write) -> None:
        self._maker = maker
        self._write = write
        self._steps = 0
        self._groups = self._samples = 0
        self._rewards: list[Tensor] = []
        self._make_s = self._send_s = self._blocked_s = 0.0
        self._ended = self._began = self._pressed_s = self._admission_s = self._fetch_s = 0.0

    def on_loop_start(self) -> None:
        """Begin to measure."""
        self._ended = time.perf_counter()

    def on_batch_start(self) -> None:
        """Begin to sum up the parts of a step, and to measure generation and scoring."""
        self._groups = self._samples = 0
        self._rewards = []
        self._make_s = self._send_s = self._blocked_s = 0.0
        self._began = time.perf_counter()

    def on_make_experience_end(self, experience: Experience) -> None:
        """Note the groups of the step."""
        self._groups += len(set(experience.group_id or ()))
        self._samples += len(experience)
        if experience.reward is not None:
            self._rewards.append(experience.reward.float().flatten().cpu())
        self._make_s += time.perf_counter() - self._began

    def on_send_start(self) -> None:
        """Begin to measure sending."""
        self._began, self._pressed_s = time.perf_counter(), self._maker.backpressure_s

    def on_send_end(self) -> None:
        """Note the times of sending."""
        began, self._began = self._began, time.perf_counter()
        self._send_s += self._began - began
        self._blocked_s += self._maker.backpressure_s - self._pressed_s

    def on_batch_end(self) -> None:
        """Write the step."""
        self._steps += 1
        before, self._ended = self._ended, time.perf_counter()
        waited_s, self._admission_s = self._admission_s, self._maker.admission_s
        fetched_s, self._fetch_s = self._fetch_s, self._maker.fetch_s
        self._write(
            "put",
            step=self._steps,
            step_s=self._ended - before,
            admission_s=self._admission_s - waited_s,
            fetch_s=self._fetch_s - fetched_s,
            groups=self._groups,
            samples=self._samples,
            policy_version=self._maker.policy_version,
            reward=_mean(torch.cat(self._rewards)) if self._rewards else None,
            make_s=self._make_s,
            send_s=self._send_s,
            backpressure_s=self._blocked_s,
        )


def _mean(reward: Tensor) -> float | None:
    """Return the mean of the rewards that are numbers; None if there is none."""
    known = reward[reward.isfinite()]
    return float(known.mean()) if len(known) else None


_log = logging.getLogger("redrb")

ROOM_TIMEOUT_S = 2.0
"""Longest wait for room for unsent groups after a maker was asked to end."""


class RecipeMaker(ExperienceMakerHolder):
    """Makes groups of a recipe's prompts with the newest published weights."""

    def __init__(self, client: Client, recipe: Recipe, write: Write) -> None:
        """Open the task, and wait for the reference policy, if there is one.

        Args:
            client: Connection to Redis.
            recipe: The recipe; its `worker` is the maker's name.
            write: Writes an event of the maker.

        Raises:
            WeightTimeout: No trainer published weights in time.
        """
        self._recipe = recipe
        self._models: dict[str, nn.Module] = {}
        seed_everything(recipe.worker_seed)
        strategy = Strategy(recipe.device or None)
        generator = torch.Generator(strategy.device).manual_seed(recipe.worker_seed)

        def models() -> tuple[Any, ...]:
            self._models = recipe.models()
            waiting = self._waiting_for_weights
            reference = reference_policy(client, recipe, self._models, waiting)
            return nn.ModuleDict(self._models), None, None, reference

        super().__init__(
            [recipe.task_name],
            lambda: strategy,
            models,
            sync_models_from_trainers=True,
            callbacks=[MakerReport(self, write)],
            name=recipe.worker,
            client=client,
            namespace=recipe.namespace,
            follow=recipe.weights_name,
            weights_timeout=recipe.weights_timeout,
            agree=agreed_settings(recipe),
            stop_timeout=recipe.stop_timeout,
            room_timeout=ROOM_TIMEOUT_S,
            in_flight_updates=recipe.in_flight_updates,
            stream_options={
                "lease_ms": recipe.lease_ms,
                "implied": settings_of_maker(client, recipe),
            },
            **recipe.generation(generator),
        )

    def build_experience_maker(
        self,
        actor: Any,  # noqa: ARG002 (the recipe names its models)
        critic: Any,  # noqa: ARG002
        reward_model: Any,  # noqa: ARG002
        initial_model: Any,
        kl_coef: float,  # noqa: ARG002
    ) -> ExperienceMaker:
        """Return the recipe's maker of experience."""
        return self._recipe.experience_maker(self._models, initial_model)

    def models_to_follow(self, actor: Any, critic: Any) -> dict[str, Any]:  # noqa: ARG002
        """Return the recipe's models."""
        return dict(self._models)

    def run(self) -> None:
        """Make groups until the recipe's number of steps is done, or the maker is asked to end.

        Raises:
            Any error of `workingloop`, or of the recipe.
        """
        groups = self.experience_maker
        stop = groups.stop if isinstance(groups, RolloutGroups) else None
        with self._stop.waking(stop) if stop else nullcontext():
            self.workingloop(lambda: self._batches(), num_steps=self._recipe.maker_steps)

    def close(self, *, timeout: float = 60.0) -> None:
        """Send the remaining groups and close; a first SIGTERM does not break this off."""
        with self._stop.on_signals():
            super().close(timeout=timeout)

    def _on_batch_end(self) -> None:
        """Count groups that could not be made as filtered."""
        if isinstance(self.experience_maker, RolloutGroups):
            failed = self.experience_maker.take_failed()
            try:
                with Deadline(stop=self._stop):
                    self._streams[0].discard_filtered(failed)
            except StoreError as error:
                _log.warning("%d groups that are filtered may not be counted: %s", failed, error)
        super()._on_batch_end()

    def _batches(self) -> Iterator[list[Prompt]]:
        return prompt_batches(self._recipe, random.Random(self._recipe.worker_seed))  # noqa: S311


def reference_policy(
    client: Client,
    recipe: Recipe,
    models: dict[str, nn.Module],
    waiting: Callable[[], AbstractContextManager[None]],
) -> nn.Module | None:
    """Wait for the reference policy and return it; None if the recipe has none.

    Args:
        client: Connection to Redis.
        recipe: The recipe.
        models: Its models.
        waiting: Announces, while its block runs, that the maker waits for weights.

    Raises:
        WeightTimeout: No trainer published it in time.
        ConfigError: The trainer has other settings than the maker.
    """
    like = recipe.reference(models)
    if like is None:
        return None
    reference = copy.deepcopy(like).requires_grad_(requires_grad=False)
    weights = WeightSubscriber(client, recipe.reference_name, namespace=recipe.namespace)
    agreement = Agreement(recipe.worker, agreed_settings(recipe))
    ends = time.monotonic() + recipe.weights_timeout
    with waiting():
        # first, because a trainer with other settings may have no reference policy
        agreement.wait(client, recipe.namespace, recipe.weights_name, recipe.weights_timeout)
        weights.wait(newer_than=0, timeout=max(0.0, ends - time.monotonic()))
    weights.poll(reference)
    return reference


def seed_everything(seed: int) -> None:
    """Seed the global random numbers of Python, numpy and torch, for the code of recipes."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
