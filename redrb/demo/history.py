"""What the workers of a run reported: kept while it runs, summed up at the end."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

RATE_WINDOW = 20
"""Steps over which the current rate is taken."""


@dataclass
class History:
    """Fed by reader threads, read by the screen.

    Attributes:
        rewards: (seconds, held-out reward) of each evaluation.
        ages: (seconds, mean staleness, largest staleness) of each step, in versions.
        samples: Samples trained.
        weight_version: Newest published version.
        steps: Optimizer steps.
        wait_for_batch_s: Seconds for which the trainer waited for batches.
    """

    rewards: list[tuple[float, float]] = field(default_factory=list)
    ages: list[tuple[float, float, float]] = field(default_factory=list)
    samples: int = 0
    weight_version: int = 0
    steps: int = 0
    wait_for_batch_s: float = 0.0
    _weighted_age: float = 0.0
    _recent: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=RATE_WINDOW))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, event: Mapping[str, Any]) -> None:
        """Take in one event of a trainer or maker."""
        with self._lock:
            if event["event"] == "evaluation":
                self.rewards.append((event["seconds"], event["reward"]))
                self.weight_version = max(self.weight_version, event["weight_version"])
            elif event["event"] == "step":
                self._add_step(event)

    def _add_step(self, event: Mapping[str, Any]) -> None:
        self.steps += 1
        self.samples += event["samples"]
        self.weight_version = max(self.weight_version, event["weight_version"])
        self.ages.append((event["seconds"], event["staleness_mean"], event["staleness_max"]))
        self._weighted_age += event["staleness_mean"] * event["samples"]
        self.wait_for_batch_s += event["wait_for_batch_s"]
        self._recent.append((event["seconds"], event["samples"]))

    @property
    def rate(self) -> float:
        """Samples a second over the last steps."""
        with self._lock:
            if len(self._recent) < 2:
                return 0.0
            seconds = self._recent[-1][0] - self._recent[0][0]
            return sum(samples for _, samples in list(self._recent)[1:]) / max(seconds, 1e-9)

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
        """Held-out reward before training; None until it is known."""
        return self.rewards[0][1] if self.rewards else None

    @property
    def reward_last(self) -> float | None:
        """Newest held-out reward; None until there is one."""
        return self.rewards[-1][1] if self.rewards else None
