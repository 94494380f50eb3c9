"""What a trainer reports: an event for each step, version and evaluation; it ends training."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from redrb.algorithms.experience_makers import RAW_REWARD
from redrb.experience import Experience
from redrb.recipe.recipe import Recipe
from redrb.train import TrainerEvents
from redrb.train.trainer import Trainer
from redrb.train.world import mean_over_ranks, rank_here
from redrb.watch.metrics.events import Write
from redrb.weights import WeightVersion
from redrb.words import counted

_log = logging.getLogger("redrb")


class TrainerReport(TrainerEvents):
    """Writes events, and stops the trainer at the target or after the last step.

    Attributes:
        steps: Steps trained, those that a checkpoint holds included.
        trained: Steps that this process has trained.
        unpublished: Steps since the last weight version.
        reached: Whether the job has reached its target, or has all its steps.
        reward: The evaluated reward that has reached the target; None: none has.
    """

    def __init__(
        self,
        trainer: Trainer,
        recipe: Recipe,
        evaluation: Callable[[], Mapping[str, Any] | None],
        write: Write,
    ) -> None:
        """Report of a trainer; `evaluation` evaluates the current weights, if a recipe does."""
        super().__init__(write)
        self.steps = self.trained = self.unpublished = 0
        self.reached = False
        self.reward: float | None = None
        self._trainer, self._recipe, self._evaluation = trainer, recipe, evaluation
        self._evaluated: int | None = None
        self._started = time.perf_counter()
        self._waited_s = 0.0
        self._rewards: list[float] = []

    def begin(self, steps: int) -> None:
        """Write at which step and with which weights the trainer begins."""
        self.steps = steps
        self._write("start", step=steps, weight_version=self._trainer.weight_version)

    def measure(self) -> None:
        """Begin to measure; evaluate the first weights.

        It stops the trainer if the target is reached, or if the job has all its steps.
        """
        self._started = time.perf_counter()
        self.evaluate()
        self._stop_after_last_step()

    def on_batch_end(self, metrics: dict[str, Any], experience: Experience) -> None:
        """Write the step; evaluate, unless weights are published before."""
        trainer, recipe = self._trainer, self._recipe
        self.steps, self.trained = self.steps + 1, self.trained + 1
        self.unpublished += 1
        before, self._waited_s = self._waited_s, trainer.wait_for_batch_s
        reward = experience.tensors.get(RAW_REWARD, experience.reward)
        if reward is not None:
            mean = float(reward.float().mean())
            self._rewards.append(metrics.get("made_reward", mean))
            metrics = {"reward": mean, **metrics}
        self._write_step(
            {"staleness_mean": 0.0, "staleness_max": 0.0, **metrics},
            experience,
            groups=recipe.groups,
            weight_version=trainer.weight_version,
            wait_for_batch_s=self._waited_s - before,
            seconds=time.perf_counter() - self._started,
        )
        self._stop_after_last_step()
        if not self.reached and self.unpublished < recipe.publish_every:
            self._evaluate_if_due()

    def on_waited(self) -> None:
        """Write the wait for a batch that has not come when training ends."""
        waited_s = self._trainer.wait_for_batch_s - self._waited_s
        seconds = time.perf_counter() - self._started
        self._write("waited", step=self.steps, wait_for_batch_s=waited_s, seconds=seconds)

    def _stop_after_last_step(self) -> None:
        if 0 < self._recipe.steps <= self.steps:
            self.reached = True
            self._trainer.stop(f"{counted(self.steps, 'step', 'are')} done,")

    def published(self, versions: Sequence[WeightVersion], publish_s: float) -> None:
        """Write each published version, with its size in full and as sent.

        Args:
            publish_s: Seconds for which publishing all of them held up the loop.
        """
        for version in versions:
            self._write(
                "publish",
                step=self.steps,
                weight_version=version.version,
                kind=version.kind,
                bytes_full=version.nbytes,
                bytes_sent=version.stored_bytes,
                publish_s=publish_s / len(versions),
            )

    def on_update_end(self) -> None:
        """Evaluate the published weights."""
        self.unpublished = 0
        self._evaluate_if_due()

    def _evaluate_if_due(self) -> None:
        if self.steps % self._recipe.evaluate_every == 0:
            self.evaluate()

    def evaluate(self) -> None:
        """Write the evaluation of this step, once, and stop at the target; all ranks call it.

        Without one, the reward is the mean of all ranks' batches since the last evaluation; before
        the first batch it is the reward at which the trainer before has reached its target.
        """
        if self._evaluated == self.steps:
            return
        self._evaluated = self.steps
        trainer = self._trainer
        found = self._evaluation()
        total, batches = mean_over_ranks([sum(self._rewards), float(len(self._rewards))])
        self._rewards = []
        if rank_here() != 0:
            return
        if found is None:
            if not batches:
                self._stop_at_target(trainer.reward_at_end, "the last reward of the job,")
                return
            found = {"reward": total / batches}
        if "reward" not in found:
            return
        place = {"step": self.steps, "weight_version": trainer.weight_version}
        seconds = time.perf_counter() - self._started
        self._write("evaluation", **{**found, **place, "seconds": seconds})
        if found.get("failed"):
            _log.warning(
                "at step %d %d held-out rewards failed, which cannot reach the target: let the "
                "reward return a number for every completion. The most frequent reason: it %s",
                self.steps,
                found["failed"],
                found.get("why_failed"),
            )
        else:
            self._stop_at_target(found["reward"], "held-out reward")

    def _stop_at_target(self, reward: float | None, name: str) -> None:
        """Stop the trainer if a reward is at the target, which is not nan or None.

        The first weights, which nobody has trained, reach no target: a target of 0 would end each
        job whose rewards are not negative before it has begun.
        """
        target = self._recipe.target_reward
        is_trained = self.steps or self._trainer.weight_version > 1
        if is_trained and reward is not None and reward >= target:
            self.reached, self.reward = True, float(reward) if math.isfinite(reward) else None
            self._trainer.stop(f"{name} {reward:.3f} has reached the target {target:g}")
