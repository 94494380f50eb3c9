"""What a maker reports: an event for each step."""

from __future__ import annotations

import time

from torch import Tensor

from redrb.experience import Experience
from redrb.metrics.events import Write
from redrb.runtime import ExperienceMakerHolder, MakerCallback


class MakerReport(MakerCallback):
    """Writes an event `put` for each step: its groups, and the times for making and sending them.

    `step_s` is the time of the whole step, loading weights included; `admission_s` the part of it
    that was a wait for the right to begin the groups; `fetch_s` the wait for new weights; `send_s`
    the time for which sending blocked the loop, and `backpressure_s` the part of it that was a wait
    for room.
    """

    def __init__(self, maker: ExperienceMakerHolder, write: Write) -> None:
        self._maker = maker
        self._write = write
        self._steps = 0
        self._event: dict[str, float | int | None] = {}
        self._ended = self._began = self._pressed_s = self._admission_s = self._fetch_s = 0.0

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
            "reward": None if reward is None else _mean(reward),
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
        fetched_s, self._fetch_s = self._fetch_s, self._maker.fetch_s
        self._write(
            "put",
            step=self._steps,
            step_s=self._ended - before,
            admission_s=self._admission_s - waited_s,
            fetch_s=self._fetch_s - fetched_s,
            **self._event,
        )


def _mean(reward: Tensor) -> float | None:
    """Return the mean of the rewards that are numbers; None if there is none."""
    known = reward[reward.isfinite()].float()
    return float(known.mean()) if len(known) else None
