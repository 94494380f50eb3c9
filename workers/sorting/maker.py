"""The demo's maker: makes experience on `ExperienceMakerHolder`, and reports each step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from redrb import Client, Experience, ExperienceMakerHolder, MakerCallback, Strategy
from redrb.weights import WeightSubscriber
from workers.metrics_log import MetricsLog
from workers.settings import MakerSettings, RolloutSettings, RunSettings
from workers.sorting.generation import rewards
from workers.sorting.policy import Actor, ActorCritic
from workers.sorting.rollout import GENERATION, SortingMaker, prompt_batch
from workers.sorting.task import sample_prompts

ROOM_TIMEOUT_S = 2.0
"""Longest wait for room for unsent groups after a maker was asked to end."""


class SortingMakerHolder(ExperienceMakerHolder):
    """Makes groups of scored completions with the newest published policy."""

    def __init__(
        self,
        client: Client,
        name: str,
        run: RunSettings,
        settings: MakerSettings,
        rollout: RolloutSettings,
        metrics: MetricsLog,
        generator: torch.Generator,
    ) -> None:
        """Wait for the reference policy, and open the task.

        Raises:
            WeightTimeout: No trainer published weights in time.
        """
        self._rollout = rollout

        def models() -> tuple[Any, Any, Any, Any]:
            policy = ActorCritic()
            return policy.actor, policy.critic, rewards, reference_policy(client, run, settings)

        super().__init__(
            [run.task],
            lambda: Strategy("cpu"),
            models,
            sync_models_from_trainers=True,
            kl_coef=rollout.kl_coef,
            callbacks=[Report(self, metrics)],
            name=name,
            client=client,
            namespace=run.namespace,
            follow=run.policy,
            weights_timeout=settings.weights_timeout,
            stop_timeout=run.stop_timeout,
            room_timeout=ROOM_TIMEOUT_S,
            in_flight_updates=settings.in_flight_updates,
            stream_options={"limit": run.limit, **run.bound},
            generator=generator,
            **GENERATION,
        )

    def build_experience_maker(
        self,
        actor: Any,
        critic: Any,
        reward_model: Any,  # noqa: ARG002 (the task has its reward)
        initial_model: Any,
        kl_coef: float,  # noqa: ARG002 (among the settings)
    ) -> SortingMaker:
        """Return the maker that samples and scores."""
        return SortingMaker(actor, critic, initial_model, self._rollout, name=self.name)


def reference_policy(client: Client, run: RunSettings, settings: MakerSettings) -> Actor:
    """Wait for the reference policy of the KL divergence, and return it.

    Raises:
        WeightTimeout: No trainer published it in time.
    """
    model = ActorCritic()
    weights = WeightSubscriber(client, run.reference, namespace=run.namespace)
    weights.wait(newer_than=0, timeout=settings.weights_timeout)
    weights.poll(model)
    return model.actor


def prompt_batches(
    generator: torch.Generator, prompts: int, group_size: int
) -> Iterator[dict[str, Tensor]]:
    """Yield batches of new prompts for ever."""
    while True:
        yield prompt_batch(sample_prompts(generator, prompts), group_size)


class Report(MakerCallback):
    """Writes an event `put` for each step: its groups, and the times for making and sending them.

    `step_s` is the time of the whole step, loading weights included; `admission_s` the part of it
    that was a wait for the right to begin the groups; `send_s` the time for which sending blocked
    the loop, and `backpressure_s` the part of it that was a wait for room.
    """

    def __init__(self, maker: ExperienceMakerHolder, metrics: MetricsLog) -> None:
        self._maker = maker
        self._metrics = metrics
        self._steps = 0
        self._event: dict[str, float | int | None] = {}
        self._ended = self._began = self._pressed_s = self._admission_s = 0.0

    def on_loop_start(self) -> None:
        """Begin to measure."""
        self._ended = time.perf_counter()

    def on_make_experience_start(self) -> None:
        """Begin to measure generation and scoring."""
        self._began = time.perf_counter()

    def on_make_experience_end(self, experience: Experience) -> None:
        """Note the groups of the step."""
        reward = experience.reward
        self._event = {
            "groups": len(set(experience.group_id or ())),
            "samples": len(experience),
            "policy_version": self._maker.policy_version,
            "reward": 0.0 if reward is None else float(reward.mean()),
            "make_s": time.perf_counter() - self._began,
        }

    def on_send_start(self) -> None:
        """Begin to measure sending."""
        self._began, self._pressed_s = time.perf_counter(), self._maker.backpressure_s

    def on_send_end(self) -> None:
        """Note the times of sending."""
        self._event["send_s"] = time.perf_counter() - self._began
        self._event["backpressure_s"] = self._maker.backpressure_s - self._pressed_s

    def on_batch_end(self) -> None:
        """Write the step."""
        self._steps += 1
        before, self._ended = self._ended, time.perf_counter()
        waited_s, self._admission_s = self._admission_s, self._maker.admission_s
        self._metrics.write(
            "put",
            step=self._steps,
            step_s=self._ended - before,
            admission_s=self._admission_s - waited_s,
            **self._event,
        )
