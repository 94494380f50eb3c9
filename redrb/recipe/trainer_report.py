"""What a trainer reports: an event for each step, version and evaluation; it ends training."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from redrb.algorithms.experience_makers import RAW_REWARD
from redrb.errors import LeaseLost, RecordError
from redrb.experience import Experience
from redrb.recipe.recipe import Recipe
from redrb.recipe.reporting import Write
from redrb.runtime import TrainerCallback
from redrb.runtime.world import rank_here
from redrb.weights import WeightVersion

if TYPE_CHECKING:
    from redrb.recipe.trainer import RecipeTrainer


class TrainerReport(TrainerCallback):
    """Writes events, and stops the trainer at the target or after the last step.

    Attributes:
        steps: Steps trained, those that a checkpoint holds included.
        trained: Steps that this process has trained.
        unpublished: Steps since the last weight version.
        reached: Whether the job has reached its target, or has all its steps.
    """

    def __init__(self, trainer: RecipeTrainer, recipe: Recipe, write: Write) -> None:
        self.steps = self.trained = self.unpublished = 0
        self.reached = False
        self._trainer, self._recipe, self._write = trainer, recipe, write
        self._evaluated: int | None = None
        self._started = self._began = time.perf_counter()
        self._waited_s = 0.0
        self._rewards: list[float] = []

    def begin(self, steps: int = 0) -> None:
        """Begin to measure after `steps` steps; evaluate the first weights.

        It stops the trainer if the target is reached, or if the job has all its steps.
        """
        self.steps = steps
        self._started = time.perf_counter()
        self._evaluate()
        self._stop_after_last_step()

    def end(self) -> None:
        """Evaluate the last weights."""
        if self._evaluated != self.steps:
            self._evaluate()

    def on_batch_start(self) -> None:
        """Begin to measure a step."""
        self._began = time.perf_counter()

    def on_batch_end(self, metrics: dict[str, Any], experience: Experience) -> None:
        """Write the step; evaluate, unless weights are published before."""
        trainer, recipe = self._trainer, self._recipe
        self.steps, self.trained = self.steps + 1, self.trained + 1
        self.unpublished += 1
        before, self._waited_s = self._waited_s, trainer.wait_for_batch_s
        now = time.perf_counter()
        ages = _ages(experience, trainer.weight_version)
        reward = experience.tensors.get(RAW_REWARD, experience.reward)
        if reward is not None:
            self._rewards.append(float(reward.float().mean()))
            metrics = {"reward": self._rewards[-1], **metrics}
        self._write(
            "step",
            **{
                **metrics,
                "step": self.steps,
                "samples": len(experience),
                "weight_version": trainer.weight_version,
                "staleness_mean": sum(ages) / max(1, len(ages)),
                "staleness_max": max(ages, default=0),
                "wait_for_batch_s": self._waited_s - before,
                "step_s": now - self._began,
                "seconds": now - self._started,
            },
        )
        self._stop_after_last_step()
        if not self.reached and self.unpublished < recipe.publish_every:
            self._evaluate_if_due()

    def _stop_after_last_step(self) -> None:
        if 0 < self._recipe.steps <= self.steps:
            self.reached = True
            self._trainer.stop(f"{self.steps} steps are done,")

    def on_batch_lost(self, error: LeaseLost) -> None:
        """Write that another trainer trains the batch again: delivery is at least once."""
        self._write("lease_lost", step=self.steps, why=str(error))

    def on_misfits(self, error: RecordError) -> None:
        """Write the ids of groups that fit into no batch."""
        self._write("misfits", step=self.steps, groups=list(error.ids), why=str(error))

    def published(self, versions: Sequence[WeightVersion]) -> None:
        """Write each published version, with its size in full and as sent."""
        for version in versions:
            self._write(
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
        if self.steps % self._recipe.evaluate_every == 0:
            self._evaluate()

    def _evaluate(self) -> None:
        """Write the recipe's evaluation, and stop the trainer at the target.

        Without one, the reward is the mean of the batches since the last evaluation.
        """
        if not self._trainer.evaluates or self._evaluated == self.steps:
            return
        found = self._trainer.evaluate()
        rewards, self._rewards = self._rewards, []
        if found is None and rewards:
            found = {"reward": sum(rewards) / len(rewards)}
        self._evaluated = self.steps
        if rank_here() != 0 or found is None or "reward" not in found:
            return
        reward, target = found["reward"], self._recipe.target_reward
        self._write(
            "evaluation",
            **{
                **found,
                "step": self.steps,
                "weight_version": self._trainer.weight_version,
                "seconds": time.perf_counter() - self._started,
            },
        )
        if reward >= target:
            self.reached = True
            self._trainer.stop(f"held-out reward {reward:.3f} has reached the target {target:g}")


def _ages(experience: Experience, version: int) -> list[int]:
    """Return the staleness of each sample, in versions, where it is known."""
    made = experience.policy_version
    known = [made] if made is None or isinstance(made, int) else made
    return [version - number for number in known if number is not None]
