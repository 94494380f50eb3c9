"""A job of simulated makers, whose durations have a heavy tail, and one trainer.

A maker's work is a wait of the duration that it has drawn: log-normal around 15 ms, and one in
twenty 30 times longer. A group carries its duration, so that the durations that were trained can be
compared with those that were made.
"""

from __future__ import annotations

import math
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

import redrb
from redrb import BufferItem, ExperienceStream
from redrb.connection.deadline import Deadline
from redrb.connection.stop import Stop
from redrb.errors import BatchTimeout, RedrbError

MEDIAN_S, SPREAD, LONG_SHARE, LONG_FACTOR = 0.015, 0.5, 0.05, 30
MEAN_S = MEDIAN_S * math.exp(SPREAD**2 / 2) * (1 + LONG_SHARE * (LONG_FACTOR - 1))
WAIT_S = 60.0
MAKER_PROCESSES = 2
KILL_EVERY_S = 5.0
LEASE_MS = 1_000
"""Of makers that are killed: their rights return after this time."""


@dataclass(frozen=True)
class Job:
    """A simulated job.

    Attributes:
        makers: Makers, each of which makes one group at a time.
        batch: Groups that are trained for each version.
        step_s: Duration of a training step.
        settings: Settings of the task.
        admits: Whether makers ask for rights.
    """

    makers: int
    batch: int
    step_s: float
    settings: dict[str, Any]
    admits: bool = False


@dataclass
class Outcome:
    """The groups of a job, and the trainer's time.

    Attributes:
        made: Durations of the groups that were put, in seconds.
        trained: Durations of those that were trained.
        staleness: Greatest staleness, in versions, of a group that was trained.
        put: Groups that were put.
        discarded: Groups that were too stale.
        lost: Rights of killed makers that were taken back.
        ran_s: Time from the first batch to the last one.
        idle_s: The part of it in which the trainer waited for a batch.
    """

    made: list[float] = field(default_factory=list)
    trained: list[float] = field(default_factory=list)
    staleness: int = 0
    put: int = 0
    discarded: int = 0
    lost: int = 0
    ran_s: float = 0.0
    idle_s: float = 0.0

    def summary(self) -> dict[str, float]:
        """Return the figures of this outcome."""
        return {
            "put": self.put,
            "trained": len(self.trained),
            "discarded_share": round(self.discarded / max(1, self.put), 4),
            "rights_lost": self.lost,
            "idle_share": round(self.idle_s / self.ran_s, 4),
            "trained_per_s": round(len(self.trained) / self.ran_s, 1),
            "most_staleness": self.staleness,
        }

    def durations(self) -> dict[str, float]:
        """Return the durations trained against those made."""
        distance, critical = kolmogorov_smirnov(self.made, self.trained)
        return {
            "long_made": round(_long_share(self.made), 4),
            "long_trained": round(_long_share(self.trained), 4),
            "ks_distance": round(distance, 4),
            "ks_critical": round(critical, 4),
        }


def durations(seed: int) -> Iterator[float]:
    """Yield durations for ever, the same ones for a seed."""
    source = random.Random(seed)
    while True:
        duration = source.lognormvariate(math.log(MEDIAN_S), SPREAD)
        yield duration * (LONG_FACTOR if source.random() < LONG_SHARE else 1)


def kolmogorov_smirnov(one: list[float], other: list[float]) -> tuple[float, float]:
    """Return the distance of two samples, and the distance that chance exceeds once in 20 times.

    The two-sample statistic and its asymptotic critical value, 1.358 * sqrt((n + m) / (n * m)).
    """
    if not one or not other:
        return 1.0, 0.0
    first, second = torch.tensor(sorted(one)), torch.tensor(sorted(other))
    points = torch.cat([first, second])
    below_first = torch.searchsorted(first, points, right=True) / len(first)
    below_second = torch.searchsorted(second, points, right=True) / len(second)
    critical = 1.358 * math.sqrt((len(one) + len(other)) / (len(one) * len(other)))
    return float((below_first - below_second).abs().max()), critical


def _long_share(found: list[float]) -> float:
    return sum(duration > 10 * MEDIAN_S for duration in found) / max(1, len(found))


def make_groups(
    stream: ExperienceStream, seed: int, over: threading.Event, *, admits: bool
) -> list[float]:
    """Make groups until it is over; returns the durations of those that were begun until then.

    Groups that are under way at the end are among them: else short ones would be in the majority.
    """
    made = []
    try:
        for duration in durations(seed):
            if admits:
                with stream.admit(timeout=WAIT_S) as right:
                    made.append(duration)
                    if over.wait(duration):
                        break
                    stream.put(_item(duration, right.version or 0), admission=right)
            else:
                version = stream.advance(0)  # not a newer version: returns the current one
                made.append(duration)
                if over.wait(duration):
                    break
                stream.put(_item(duration, version), timeout=WAIT_S)
    except RedrbError:
        if not over.is_set():
            raise
    return made


def _item(duration: float, version: int) -> list[BufferItem]:
    item = BufferItem(
        sequences=torch.zeros(4, dtype=torch.int64),
        action_log_probs=torch.zeros(2),
        values=torch.tensor(0.0),
        reward=torch.tensor(0.0),
        kl=torch.zeros(2),
        advantages=torch.tensor(0.0),
        policy_version=version,
        extras={"duration": duration},
    )
    return [item]


def train(stream: ExperienceStream, job: Job, seconds: float, outcome: Outcome) -> None:
    """Train for so many seconds from the first batch; each step ends with a new version."""
    version = stream.advance(1)
    began = None
    while began is None or time.monotonic() - began < seconds:
        waited = time.monotonic()
        try:
            lease = stream.take(job.batch, timeout=WAIT_S)
        except BatchTimeout as error:
            raise SystemExit(f"the simulated trainer got no batch: {error}") from error
        with lease:
            if began is None:
                began = time.monotonic()
            else:
                outcome.idle_s += time.monotonic() - waited
            items = lease.items()
            outcome.trained += [float((item.extras or {})["duration"]) for item in items]
            oldest = min(item.policy_version or 0 for item in items)
            outcome.staleness = max(outcome.staleness, version - oldest)
            threading.Event().wait(job.step_s)
        version = stream.advance(version + 1)
    outcome.ran_s = time.monotonic() - began


def run(url: str, name: str, job: Job, seconds: float) -> Outcome:
    """Run a job with makers in threads of this process."""
    outcome, over, stop = Outcome(), threading.Event(), Stop()
    with redrb.connect(url) as client, _opened(client, name, job) as stream:
        stream.advance(1)
        streams = [ExperienceStream(client, name) for _ in range(job.makers)]

        def make(number: int) -> None:
            with Deadline(stop=stop):
                outcome.made += make_groups(streams[number], number, over, admits=job.admits)

        threads = [threading.Thread(target=make, args=(each,)) for each in range(job.makers)]
        for thread in threads:
            thread.start()
        try:
            train(stream, job, seconds, outcome)
            _count(stream, outcome)
        finally:
            over.set()
            stop.ask()
            for thread in threads:
                thread.join()
            for each in streams:
                each.close()
    return outcome


def run_with_killed_makers(url: str, name: str, job: Job, seconds: float) -> Outcome:
    """Run a job with makers in processes, one of which is killed every few seconds and replaced."""
    outcome, over = Outcome(), threading.Event()
    with redrb.connect(url) as client, _opened(client, name, job) as stream:
        stream.advance(1)
        killer = threading.Thread(target=_kill, args=(url, name, job.makers, over))
        killer.start()
        try:
            train(stream, job, seconds, outcome)
            _count(stream, outcome)
        finally:
            over.set()
            killer.join()
    return outcome


def _count(stream: ExperienceStream, outcome: Outcome) -> None:
    stats = stream.stats()
    outcome.put, outcome.discarded = stats.ledger.put, stats.ledger.expired
    outcome.lost = stats.admission.lost if stats.admission else 0


def _kill(url: str, name: str, makers: int, over: threading.Event) -> None:
    """Keep processes of makers alive, and kill the oldest one every few seconds."""
    processes: list[subprocess.Popen[str]] = []
    number = 0
    try:
        while True:
            while len(processes) < MAKER_PROCESSES:
                number += 1
                arguments = [url, name, str(makers // MAKER_PROCESSES), str(number * 1000)]
                command = [sys.executable, "-m", __name__, *arguments]
                processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            oldest = processes[0]
            assert oldest.stdout is not None
            oldest.stdout.readline()  # it begins to make groups
            if over.wait(KILL_EVERY_S):
                break
            oldest.kill()
            oldest.communicate()
            del processes[0]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@contextmanager
def _opened(client: redrb.Client, name: str, job: Job) -> Iterator[ExperienceStream]:
    with ExperienceStream(client, name, **job.settings) as stream:
        yield stream
        stream.clear()


def _main(url: str, name: str, makers: str, seed: str) -> None:
    """Run the makers of one process until it is killed."""
    over = threading.Event()
    with redrb.connect(url) as client:

        def make(number: int) -> None:
            with ExperienceStream(client, name, lease_ms=LEASE_MS) as stream:
                make_groups(stream, number, over, admits=True)

        numbers = range(int(seed), int(seed) + int(makers))
        threads = [threading.Thread(target=make, args=(each,), daemon=True) for each in numbers]
        for thread in threads:
            thread.start()
        print("makers begin", flush=True)
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    _main(*sys.argv[1:])
