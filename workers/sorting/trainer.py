"""The demo's trainer: starts and ends training on `DetachedPPOTrainer`, and reports each step."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from redrb import (
    Client,
    DetachedPPOTrainer,
    Experience,
    ExperienceStream,
    Strategy,
    TrainerCallback,
)
from redrb.errors import BatchTimeout, LeaseLost, RecordError
from redrb.weights import WeightPublisher, WeightVersion
from workers.metrics_log import MetricsLog
from workers.settings import PPOSettings, RunSettings, TrainerSettings
from workers.sorting.generation import evaluate
from workers.sorting.policy import Actor, ActorCritic
from workers.sorting.task import held_out_prompts
from workers.sorting.warm_start import warm_start

NOTHING_TO_TRAIN = (
    "before this trainer began: to begin anew, use another --namespace or an empty Redis"
)


class SortingTrainer(DetachedPPOTrainer):
    """Trains the policy on the makers' groups, and evaluates it on held-out prompts."""

    def __init__(
        self,
        client: Client,
        run: RunSettings,
        settings: TrainerSettings,
        ppo: PPOSettings,
        metrics: MetricsLog,
    ) -> None:
        """Open the task."""
        self._run = run
        self._settings = settings
        self._connection = client
        model = ActorCritic()
        self._reports = Report(self, model.actor, settings, metrics)
        # the task remembers its limit, which here is in groups and need not be whole batches
        ExperienceStream(
            client, run.task, namespace=run.namespace, limit=run.limit, **run.bound
        ).close()
        super().__init__(
            [],  # makers find the trainer by its name
            lambda: Strategy("cpu"),
            lambda: (model.actor, model.critic),
            train_batch_size=settings.groups,
            eps_clip=ppo.clip,
            value_clip=ppo.value_clip,
            callbacks=[self._reports],
            actor_lr=ppo.actor_learning_rate,
            critic_lr=ppo.critic_learning_rate,
            ppo_options=ppo_options(ppo),
            name=run.policy,
            task=run.task,
            client=client,
            namespace=run.namespace,
            timeout=settings.idle_timeout,
            lease_ms=settings.lease_ms,
            weights_dtype=settings.weights_dtype,
            stop_timeout=run.stop_timeout,
            **run.bound,
        )

    def build_optimizer(self, model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
        """Return Adam."""
        return torch.optim.Adam(model.parameters(), lr=learning_rate, fused=True)

    def begin(self) -> None:
        """Load the newest published policy, or publish a warm start; then evaluate it."""
        if not self.take_over({"actor": self.actor, "critic": self.critic}):
            model = warm_start(self._run.seed)
            self.actor.load_state_dict(model.actor.state_dict())
            self.critic.load_state_dict(model.critic.state_dict())
            reference = WeightPublisher(
                self._connection, self._run.reference, namespace=self._run.namespace
            )
            reference.publish(model)
            self.sync_models_to_remote_makers()
        self._reports.begin()

    def work(self) -> None:
        """Train until the end; publish and evaluate the last weights.

        Raises:
            BatchTimeout: No full batch came for `idle_timeout` seconds.
            PublisherFenced: Another trainer began to publish under the same name.
        """
        settings = self._settings
        reason = f"{settings.max_seconds:g} seconds are over,"
        over = threading.Timer(settings.max_seconds, self.stop, [reason])
        over.daemon = True
        if settings.max_seconds:
            over.start()
        try:
            self.fit(None, settings.publish_every)
        except BatchTimeout:
            self._publish()
            raise
        finally:
            over.cancel()
        self._publish()
        self._reports.end()

    def why_over(self) -> str:
        """Return why training ended."""
        reports, version = self._reports, self.weight_version
        if self.stopped in signal.Signals.__members__:
            return f"it was asked to, after {reports.steps} steps at weight version {version}"
        advice = "" if reports.steps or not reports.reached else f", {NOTHING_TO_TRAIN}"
        return f"{self.stopped} at weight version {version}{advice}"

    def _update_remote_makers(self, fully_update: bool = False, **config: Any) -> None:  # noqa: FBT001
        super()._update_remote_makers(fully_update, **config)
        self._reports.published(self.published)

    def _publish(self) -> None:
        """Publish the weights if they were trained since the last version."""
        if self._reports.unpublished:
            self.sync_models_to_remote_makers()


def ppo_options(settings: PPOSettings) -> dict[str, Any]:
    """Return options of `PPOStep`: values learn returns, all actions of a batch weigh the same."""
    return {
        "value_target": "returns",
        "entropy_coef": settings.entropy_coef,
        "max_grad_norm": settings.max_grad_norm,
        "aggregation": "token",
        "normalise_advantages": True,
    }


class Report(TrainerCallback):
    """Writes an event for each step and evaluation, and stops the trainer at the target.

    Attributes:
        steps: Steps trained.
        unpublished: Steps since the last weight version.
        reached: Whether the target was reached.
    """

    def __init__(
        self, trainer: SortingTrainer, actor: Actor, settings: TrainerSettings, metrics: MetricsLog
    ) -> None:
        self._actor = actor
        self.steps = self.unpublished = 0
        self.reached = False
        self._trainer = trainer
        self._settings = settings
        self._metrics = metrics
        self._held_out = held_out_prompts()
        self._evaluated: int | None = None
        self._started = self._began = time.perf_counter()
        self._waited_s = 0.0

    def begin(self) -> None:
        """Begin to measure; evaluate the first weights."""
        self._started = time.perf_counter()
        self._evaluate()

    def end(self) -> None:
        """Evaluate the last weights."""
        if self._evaluated != self.steps:
            self._evaluate()

    def on_batch_start(self) -> None:
        """Begin to measure a step."""
        self._began = time.perf_counter()

    def on_batch_end(self, metrics: dict[str, Any], experience: Experience) -> None:
        """Write the step; evaluate, unless weights are published before."""
        trainer, settings = self._trainer, self._settings
        self.steps += 1
        self.unpublished += 1
        before, self._waited_s = self._waited_s, trainer.wait_for_batch_s
        now = time.perf_counter()
        ages = _ages(experience, trainer.weight_version)
        self._metrics.write(
            "step",
            step=self.steps,
            samples=len(experience),
            weight_version=trainer.weight_version,
            staleness_mean=sum(ages) / max(1, len(ages)),
            staleness_max=max(ages, default=0),
            wait_for_batch_s=self._waited_s - before,
            step_s=now - self._began,
            seconds=now - self._started,
            **metrics,
        )
        if 0 < settings.steps <= self.steps:
            trainer.stop(f"{self.steps} steps are done,")
        elif self.unpublished < settings.publish_every:
            self._evaluate_if_due()

    def on_batch_lost(self, error: LeaseLost) -> None:
        """Write that another trainer trains the batch again: delivery is at least once."""
        self._metrics.write("lease_lost", step=self.steps, why=str(error))

    def on_misfits(self, error: RecordError) -> None:
        """Write the ids of groups that fit into no batch."""
        self._metrics.write("misfits", step=self.steps, groups=list(error.ids), why=str(error))

    def published(self, versions: Sequence[WeightVersion]) -> None:
        """Write each published version, with its size in full and as sent."""
        for version in versions:
            self._metrics.write(
                "publish",
                step=self.steps,
                weight_version=version.version,
                kind=version.kind,
                bytes_full=version.nbytes,
                bytes_sent=version.stored_bytes,
            )

    def on_update_end(self) -> None:
        """Evaluate the published weights."""
        self.unpublished = 0
        self._evaluate_if_due()

    def _evaluate_if_due(self) -> None:
        if self.steps % self._settings.evaluate_every == 0:
            self._evaluate()

    def _evaluate(self) -> None:
        """Write the mean reward on held-out prompts, and stop the trainer at the target."""
        trainer, target = self._trainer, self._settings.target_reward
        reward = evaluate(self._actor, self._held_out)
        seconds = time.perf_counter() - self._started
        self._evaluated = self.steps
        self._metrics.write(
            "evaluation",
            step=self.steps,
            reward=reward,
            weight_version=trainer.weight_version,
            seconds=seconds,
        )
        if reward >= target:
            self.reached = True
            trainer.stop(f"held-out reward {reward:.3f} has reached the target {target:g}")


def _ages(experience: Experience, version: int) -> list[int]:
    """Return the staleness of each sample, in versions, where it is known."""
    made = experience.policy_version
    known = [made] if made is None or isinstance(made, int) else made
    return [version - number for number in known if number is not None]
