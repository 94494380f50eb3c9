"""Collects the events that the workers of a job report, over all its runs, and sums them up."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

RATE_WINDOW = 20
"""Steps over which the current rate is measured."""


@dataclass
class History:
    """The events of a job; reader threads add them, the screen and the report read them.

    Seconds are those of training: where a trainer starts again, its seconds follow those before.

    Attributes:
        rewards: (seconds, evaluated reward) of each evaluation.
        ages: (seconds, mean staleness, largest staleness) of each step, in versions.
        samples: Samples trained.
        weight_version: Newest published version.
        versions_by_kind: Versions published: "full" and "delta".
        weights_bytes_full: Bytes of these versions if each were published in full.
        weights_bytes_sent: Bytes that were published.
        steps: Optimizer steps.
        wait_for_batch_s: Seconds for which trainers waited for batches, after their first ones.
        maker_s: Seconds of all makers' steps.
        admission_s: The part of `maker_s` in which they waited for the right to begin groups.
        send_s: The part of `maker_s` in which sending blocked the makers.
        backpressure_s: The part of `send_s` in which they waited for room.
        runs_s: Seconds of earlier runs.
        ended: Why the newest trainer ended by itself; "": it has not.
    """

    rewards: list[tuple[float, float]] = field(default_factory=list)
    ages: list[tuple[float, float, float]] = field(default_factory=list)
    samples: int = 0
    weight_version: int = 0
    versions_by_kind: Counter[str] = field(default_factory=Counter)
    weights_bytes_full: int = 0
    weights_bytes_sent: int = 0
    steps: int = 0
    wait_for_batch_s: float = 0.0
    maker_s: float = 0.0
    admission_s: float = 0.0
    send_s: float = 0.0
    backpressure_s: float = 0.0
    runs_s: float = 0.0
    ended: str = ""
    _before_s: float = 0.0
    _newest_s: float = 0.0
    _first_step: bool = True
    _weighted_age: float = 0.0
    _recent: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=RATE_WINDOW))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, event: Mapping[str, Any]) -> None:
        """Add one event of a trainer, a maker or an earlier run."""
        with self._lock:
            if event["event"] == "evaluation":
                self.rewards.append((self._seconds(event), event["reward"]))
                self.weight_version = max(self.weight_version, event["weight_version"])
            elif event["event"] == "step":
                self._add_step(event)
            elif event["event"] == "publish":
                self.versions_by_kind[event["kind"]] += 1
                self.weights_bytes_full += event["bytes_full"]
                self.weights_bytes_sent += event["bytes_sent"]
            elif event["event"] == "put":
                self.maker_s += event["step_s"]
                self.admission_s += event["admission_s"]
                self.send_s += event["send_s"]
                self.backpressure_s += event["backpressure_s"]
            elif event["event"] == "end":
                self.ended = event["why"]
            elif event["event"] == "finished":
                self.runs_s += event["seconds"]

    @property
    def trained_s(self) -> float:
        """Seconds of training, of all trainers."""
        return self._before_s + self._newest_s

    def _seconds(self, event: Mapping[str, Any]) -> float:
        """Return the seconds of training at an event; the seconds of a new process begin at 0."""
        if event["seconds"] < self._newest_s:
            self._before_s += self._newest_s
            self._first_step = True
        self._newest_s = event["seconds"]
        return self._before_s + self._newest_s

    def _add_step(self, event: Mapping[str, Any]) -> None:
        seconds = self._seconds(event)
        self.steps += 1
        self.samples += event["samples"]
        self.weight_version = max(self.weight_version, event["weight_version"])
        self.ages.append((seconds, event["staleness_mean"], event["staleness_max"]))
        self._weighted_age += event["staleness_mean"] * event["samples"]
        if not self._first_step:  # the first wait is for the makers to start
            self.wait_for_batch_s += event["wait_for_batch_s"]
        self._first_step = False
        self._recent.append((seconds, event["samples"]))

    @property
    def rate(self) -> float:
        """Samples a second over the last steps."""
        with self._lock:
            if len(self._recent) < 2:
                return 0.0
            seconds = self._recent[-1][0] - self._recent[0][0]
            return sum(samples for _, samples in list(self._recent)[1:]) / max(seconds, 1e-9)

    @property
    def trainer_wait_share(self) -> float:
        """Share of the trainer's time in which it waited for data, after its first batch."""
        seconds = self.ages[-1][0] - self.ages[0][0] if self.ages else 0.0
        return self.wait_for_batch_s / seconds if seconds else 0.0

    @property
    def maker_send_share(self) -> float:
        """Share of the makers' time in which sending blocked them, waiting for room included."""
        return self.send_s / self.maker_s if self.maker_s else 0.0

    @property
    def maker_admission_share(self) -> float:
        """Share of the makers' time in which they waited for rights: the trainer is slower."""
        return self.admission_s / self.maker_s if self.maker_s else 0.0

    @property
    def maker_room_share(self) -> float:
        """Share of the makers' time in which they waited for room: the trainer is slower."""
        return self.backpressure_s / self.maker_s if self.maker_s else 0.0

    @property
    def staleness_mean(self) -> float:
        """Mean staleness of all samples trained, in versions."""
        return self._weighted_age / max(1, self.samples)

    @property
    def staleness_max(self) -> int:
        """Largest staleness of a sample trained, in versions."""
        return int(max((largest for _, _, largest in self.ages), default=0))

    @property
    def reward_first(self) -> float | None:
        """Evaluated reward before training; None until it is known."""
        return self.rewards[0][1] if self.rewards else None

    @property
    def reward_last(self) -> float | None:
        """Newest evaluated reward; None until there is one."""
        return self.rewards[-1][1] if self.rewards else None
