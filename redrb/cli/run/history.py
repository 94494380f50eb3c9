"""Collects the events that the workers of a job report, over all its runs, and sums them up."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from redrb.watch.metrics.events import numbers_of

WINDOW: Final = 20
"""Steps over which the rate is measured."""

SHORTEST_QUIET_S: Final = 5.0
"""Seconds without a step that are never too long."""

QUIET_STEPS: Final = 3
"""Mean times of a step that may pass without one."""


MOST_FAULTS = 20
"""Most kinds of faults that are counted one by one."""


@dataclass
class FilteredReason:
    """Why groups are filtered."""

    why: str
    groups: int = 0


@dataclass
class JobEvents:
    """The events of a job; reader threads add them, the lines of the run and the report read them.

    Seconds are those of training: where a trainer starts again, its seconds follow those before.

    Attributes:
        reward_first: Evaluated reward before training; None until it is known.
        reward_last: Newest evaluated reward; None until there is one.
        staleness_newest: Mean and largest staleness of the newest step of this run, in versions;
            None: it had no step.
        weights_bytes_full: Bytes of these versions if each were published in full.
        steps: Optimizer steps of the job, as its newest trainer counts them: steps that a restarted
            trainer repeats after its checkpoint count once.
        wait_for_batch_s: Seconds for which trainers waited for batches, after their first ones.
        maker_s: Seconds of all makers' steps.
        admission_s: The part of `maker_s` in which they waited for the right to begin groups.
        send_s: The part of `maker_s` in which sending blocked the makers.
        backpressure_s: The part of `send_s` in which they waited for room.
        ended: Why the newest trainer ended by itself; "": it has not.
        newest_fault: Why the newest group since the newest step of this run was filtered; "": none.
    """

    reward_first: float | None = None
    reward_last: float | None = None
    staleness_newest: tuple[float, float] | None = None
    staleness_max: int = 0
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
    faults: dict[str, FilteredReason] = field(default_factory=dict)
    newest_fault: str = ""
    _before_s: float = 0.0
    _newest_s: float = 0.0
    _first_step: bool = True
    _weighted_age: float = 0.0
    _steps_s: tuple[float, float] | None = None  # seconds at the first and the newest step
    _recent: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _newest_at: float = 0.0
    _heard_at: float = 0.0
    _clock: Callable[[], float] = time.monotonic
    _unsaid: set[str] = field(default_factory=set)  # kinds of faults of this run
    _said: set[str] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, event: Mapping[str, Any]) -> None:
        """Add one event of a trainer, a maker or an earlier run.

        Values that are missing, null or of another type count as 0: a recipe may print such events.
        """
        found = {name: n for name, n in numbers_of(event) if not isinstance(event[name], bool)}
        kind, number = event.get("event"), defaultdict(float, found)
        with self._lock:
            if kind in ("start", "evaluation", "step", "publish"):
                self._heard_at = self._clock()
            if kind == "start" and "step" in number:
                self._begin_trainer()
            elif kind == "evaluation":
                self._seconds(number)
                if "reward" in number:  # else all rewards of the evaluation have failed
                    self.reward_last = number["reward"]
                    if self.reward_first is None:
                        self.reward_first = self.reward_last
                self.weight_version = max(self.weight_version, int(number["weight_version"]))
            elif kind == "step":
                self._add_step(number)
            elif kind == "publish":
                self.versions_by_kind[str(event.get("kind"))] += 1
                self.weight_version = max(self.weight_version, int(number["weight_version"]))
                self.weights_bytes_full += int(number["bytes_full"])
                self.weights_bytes_sent += int(number["bytes_sent"])
            elif kind == "waited" and "wait_for_batch_s" in number:
                seconds = self._seconds(number)
                if self._steps_s and not self._first_step:
                    self.wait_for_batch_s += number["wait_for_batch_s"]
                    self._steps_s = self._steps_s[0], seconds
            elif kind in ("put", "waited"):
                self.maker_s += number["step_s"]
                self.admission_s += number["admission_s"]
                self.send_s += number["send_s"]
                self.backpressure_s += number["backpressure_s"]
            elif kind == "filtered":
                fault_kind, why = str(event.get("kind")), str(event.get("why"))
                if fault_kind not in self.faults and len(self.faults) >= MOST_FAULTS:
                    fault_kind, why = "others", "other reasons"
                fault = self.faults.setdefault(fault_kind, FilteredReason(why))
                fault.why, fault.groups = why, fault.groups + int(number["groups"])
                self._unsaid |= {fault_kind} - self._said
                self.newest_fault = str(event.get("why"))
            elif kind == "end":
                self.ended = str(event.get("why") or "")
            elif kind == "finished":
                self.runs_s += number["seconds"]

    def begin_run(self) -> None:
        """Part the events of earlier runs, which were added, from those of this run."""
        with self._lock:
            self.ended = self.newest_fault = ""
            self._recent.clear()
            self.staleness_newest = None
            self._unsaid.clear()
            self._heard_at = self._clock()

    def new_faults(self) -> list[str]:
        """Return the faults that have come up in this run since the last call, each once."""
        with self._lock:
            found = [fault.why for kind, fault in self.faults.items() if kind in self._unsaid]
            self._said |= self._unsaid
            self._unsaid.clear()
            return found

    @property
    def costliest_faults(self) -> list[FilteredReason]:
        """Why groups were filtered, the fault of the most groups first."""
        with self._lock:
            return sorted(self.faults.values(), key=lambda fault: -fault.groups)

    @property
    def trained_s(self) -> float:
        """Seconds of training, of all trainers."""
        return self._before_s + self._newest_s

    def _begin_trainer(self) -> None:
        self._before_s, self._newest_s, self._first_step = self.trained_s, 0.0, True

    def _seconds(self, number: Mapping[str, float]) -> float:
        """Return the seconds of training at an event; the seconds of a new process begin at 0."""
        seconds = number.get("seconds", self._newest_s)
        if seconds < self._newest_s:
            self._begin_trainer()
        self._newest_s = seconds
        return self._before_s + self._newest_s

    def _add_step(self, number: Mapping[str, float]) -> None:
        seconds = self._seconds(number)
        samples, staleness = int(number["samples"]), number["staleness_mean"]
        self.steps = int(number.get("step", self.steps + 1))
        self.samples += samples
        self.weight_version = max(self.weight_version, int(number["weight_version"]))
        self.staleness_newest = staleness, number["staleness_max"]
        self.staleness_max = max(self.staleness_max, int(number["staleness_max"]))
        self._steps_s = self._steps_s[0] if self._steps_s else seconds, seconds
        self._weighted_age += staleness * samples
        if not self._first_step:  # the first wait is for the makers to start
            self.wait_for_batch_s += number["wait_for_batch_s"]
        self._first_step = False
        self._recent.append((seconds, samples))
        self.newest_fault = ""
        self._newest_at = self._clock()

    @property
    def rate(self) -> float:
        """Samples a second over the last steps; 0 while no step comes."""
        if self.quiet_s:
            return 0.0
        with self._lock:
            over_s = self._recent[-1][0] - self._recent[0][0] if self._recent else 0.0
            samples = sum(samples for _, samples in list(self._recent)[1:])
            return samples / over_s if over_s > 0 else 0.0

    @property
    def quiet_s(self) -> float:
        """Seconds since the newest step of this run if they are more than steps take, else 0."""
        with self._lock:
            if not self._recent:
                return 0.0
            since_s = self._clock() - self._newest_at
            step_s = (self._recent[-1][0] - self._recent[0][0]) / max(1, len(self._recent) - 1)
            return since_s if since_s > max(SHORTEST_QUIET_S, QUIET_STEPS * step_s) else 0.0

    @property
    def silent_s(self) -> float:
        """Seconds since a worker has started or the trainer has got on."""
        return self._clock() - self._heard_at

    @property
    def trainer_wait_share(self) -> float:
        """Share of the trainer's time in which it waited for data, after its first batch."""
        first, newest = self._steps_s or (0.0, 0.0)
        seconds = newest - first
        return self.wait_for_batch_s / seconds if seconds else 0.0

    def share_of_makers(self, seconds: float) -> float:
        """Return a part of `maker_s` as a share of it."""
        return seconds / self.maker_s if self.maker_s else 0.0

    @property
    def staleness_mean(self) -> float:
        """Mean staleness of all samples trained, in versions."""
        return self._weighted_age / max(1, self.samples)
