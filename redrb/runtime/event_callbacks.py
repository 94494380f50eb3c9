"""`TrainerEvents` and `MakerEvents`: callbacks that report each step as an event."""

from __future__ import annotations

import time
from typing import Any

from redrb.errors import LeaseLost, RecordError
from redrb.experience import Experience
from redrb.metrics.events import Write
from redrb.runtime.callbacks import MakerCallback, TrainerCallback


class TrainerEvents(TrainerCallback):
    """Writes an event `step` for each batch: its metrics, samples, mean reward and time.

    Example:
        >>> with TensorBoardLog("runs/first") as log:
        ...     trainer = DetachedPPOTrainer(..., callbacks=[TrainerEvents(log.write)])
        ...     trainer.fit(total_steps=1000, update_steps=10)
    """

    def __init__(self, write: Write) -> None:
        """Write events by a function, such as `TensorBoardLog(folder).write`."""
        self._write = write
        self._steps = 0
        self._began = 0.0

    def on_batch_start(self) -> None:
        """Begin to measure a step."""
        self._began = time.perf_counter()

    def on_batch_end(self, metrics: dict[str, Any], experience: Experience) -> None:
        """Write the step."""
        self._steps += 1
        self._write(
            "step",
            **{
                **_reward(experience),
                **metrics,
                "step": self._steps,
                "samples": len(experience),
                "step_s": time.perf_counter() - self._began,
            },
        )

    def on_batch_lost(self, error: LeaseLost) -> None:
        """Write that another trainer trains the batch again."""
        self._write("lease_lost", step=self._steps, why=str(error))

    def on_misfits(self, error: RecordError) -> None:
        """Write the ids of groups that fit into no batch."""
        self._write("misfits", step=self._steps, groups=list(error.ids), why=str(error))

    def on_update_start(self) -> None:
        """Begin to measure the update of the makers."""
        self._began = time.perf_counter()

    def on_update_end(self) -> None:
        """Write the time of the update."""
        self._write("publish", step=self._steps, publish_s=time.perf_counter() - self._began)


class MakerEvents(MakerCallback):
    """Writes an event `put` for each batch of prompts: its samples, mean reward and times."""

    def __init__(self, write: Write) -> None:
        """Write events by a function, such as `TensorBoardLog(folder).write`."""
        self._write = write
        self._steps = self._samples = 0
        self._rewards: list[float] = []
        self._make_s = self._send_s = self._began = 0.0

    def on_batch_start(self) -> None:
        """Begin a batch of prompts."""
        self._samples, self._rewards = 0, []
        self._make_s = self._send_s = 0.0

    def on_make_experience_start(self) -> None:
        """Begin to measure generation and scoring."""
        self._began = time.perf_counter()

    def on_make_experience_end(self, experience: Experience) -> None:
        """Note the samples."""
        self._make_s += time.perf_counter() - self._began
        self._samples += len(experience)
        if experience.reward is not None:
            self._rewards += experience.reward.float().flatten().tolist()

    def on_send_start(self) -> None:
        """Begin to measure sending."""
        self._began = time.perf_counter()

    def on_send_end(self) -> None:
        """Note the time of sending."""
        self._send_s += time.perf_counter() - self._began

    def on_batch_end(self) -> None:
        """Write the step."""
        self._steps += 1
        rewards = self._rewards
        self._write(
            "put",
            step=self._steps,
            samples=self._samples,
            reward=sum(rewards) / len(rewards) if rewards else None,
            make_s=self._make_s,
            send_s=self._send_s,
        )


def _reward(experience: Experience) -> dict[str, float]:
    reward = experience.reward
    return {} if reward is None else {"reward": float(reward.float().mean())}
