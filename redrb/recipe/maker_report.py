"""What a maker reports: an event for each step."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from redrb.experience import Experience
from redrb.metrics.events import Write
from redrb.runtime import ExperienceMakerHolder, MakerCallback


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
