"""Rounds of several contestants in turn, and the rates and costs that they show."""

from __future__ import annotations

import importlib
import math
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from statistics import median
from typing import Any

from benchmarks.processes import Worker, started
from benchmarks.server import Server
from benchmarks.shapes import SHAPES
from benchmarks.systems import Job
from redrb.stream.task.settings import SettingArguments


@dataclass(frozen=True)
class Round:
    """One round of one contestant.

    Attributes:
        samples: Samples that were put, and taken if anybody took.
        seconds: From the common start to the last acknowledgement, or to the last put.
        producer_s, consumer_s, server_s: Seconds of processor time of all producers, of all
            consumers, and of the server.
        input_bytes: Bytes that the server received.
        memory_bytes: Growth of the server's memory, where nobody took.
    """

    samples: int
    seconds: float
    producer_s: float
    consumer_s: float
    server_s: float
    input_bytes: float
    memory_bytes: float

    @property
    def rate(self) -> float:
        """Samples a second."""
        return self.samples / self.seconds


class Side:
    """One producer or consumer, which runs in a process of its own."""

    def __init__(self, barrier: Barrier) -> None:
        self._barrier = barrier

    def run(self, system: str, part: str, *arguments: Any) -> tuple[float, float, float]:
        """Run `produce` or `consume` of a system.

        Args:
            system: Module of `benchmarks.systems`.
            part: "produce" or "consume".
            arguments: URL, key, name of the shape, groups of this side, settings, number of tasks.

        Returns:
            When it began and ended, and its processor seconds.
        """
        url, key, shape, groups, settings, tasks = arguments
        job = Job(url, key, shape, groups, self._barrier, settings, tasks)
        try:
            getattr(importlib.import_module(f"benchmarks.systems.{system}"), part)(job)
        except BaseException:
            self._barrier.abort()
            raise
        return job.began_s, job.ended_s, job.processor_s


class Sides:
    """Producer and consumer processes that run round after round."""

    def __init__(self, producers: list[Worker], consumers: list[Worker]) -> None:
        self._producers, self._consumers = producers, consumers

    def groups(self, shape_name: str, size: float, tasks: int) -> int:
        """Return the groups of a round: about `size` of a full one, the same for each side."""
        shape, producers, consumers = SHAPES[shape_name], self._producers, self._consumers
        unit = tasks * math.lcm(
            shape.put_groups * len(producers), shape.take_groups * max(1, len(consumers))
        )
        return unit * max(1, round(shape.round_groups * size / unit))

    def run(
        self,
        server: Server,
        system: str,
        shape_name: str,
        *,
        size: float = 1.0,
        settings: SettingArguments | None = None,
        unix: bool = False,
        tasks: int = 1,
    ) -> Round:
        """Run one round of a system; empties the server afterwards.

        Raises:
            ProcessFailed: A side failed.
        """
        groups = self.groups(shape_name, size, tasks)
        before = server.info()
        url = server.unix_url if unix else server.url
        key = f"bench-{uuid.uuid4().hex}"
        for part, workers in (("consume", self._consumers), ("produce", self._producers)):
            for worker in workers:
                own = groups // len(workers)
                worker.ask("run", system, part, url, key, shape_name, own, settings or {}, tasks)
        consumed = [worker.result() for worker in self._consumers]
        produced = [worker.result() for worker in self._producers]
        after = server.info()
        server.clear()
        times = [*produced, *consumed]
        return Round(
            samples=groups * SHAPES[shape_name].group_samples,
            seconds=max(ended for _, ended, _ in times) - min(began for began, *_ in times),
            producer_s=sum(spent for *_, spent in produced),
            consumer_s=sum(spent for *_, spent in consumed),
            **{
                field: after[counter] - before[counter]
                for field, counter in (
                    ("server_s", "processor_s"),
                    ("input_bytes", "input_bytes"),
                    ("memory_bytes", "memory_bytes"),
                )
            },
        )


@contextmanager
def sides(producers: int = 1, consumers: int = 1) -> Iterator[Sides]:
    """Start so many producer and consumer processes."""
    barrier = get_context("spawn").Barrier(producers + consumers)
    with started([lambda: Worker(Side, barrier)] * (producers + consumers)) as workers:
        yield Sides(workers[:producers], workers[producers:])


def race(
    contestants: Mapping[str, Callable[[], Round]], rounds: int, title: str = ""
) -> dict[str, list[Round]]:
    """Run rounds of all contestants in turn, each round beginning with another of them.

    One untimed round of each comes first.
    """
    names = list(contestants)
    found: dict[str, list[Round]] = {name: [] for name in names}
    for number in range(-1, rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            result = contestants[name]()
            if number >= 0:
                found[name].append(result)
    shown = "  ".join(f"{name} {median_rate(each):,.0f}" for name, each in found.items())
    print(f"{title:24} {shown} samples/s", flush=True)
    return found


def median_rate(rounds: list[Round]) -> float:
    """Return the median samples a second."""
    return median(each.rate for each in rounds)


def ratio(ours: list[Round], theirs: list[Round]) -> float:
    """Return the median ratio of the rates of rounds that ran one after the other."""
    return median(a.rate / b.rate for a, b in zip(ours, theirs, strict=True))


def summary(rounds: list[Round]) -> dict[str, Any]:
    """Return the figures of a contestant: rates, and costs a sample in microseconds and bytes."""

    def cost(field: str, scale: float) -> float:
        spent: list[float] = [getattr(each, field) / each.samples for each in rounds]
        return median(spent) * scale

    rates = [each.rate for each in rounds]
    return {
        "samples_per_s": round(median(rates), 1),
        "least": round(min(rates), 1),
        "most": round(max(rates), 1),
        "producer_us": round(cost("producer_s", 1e6), 2),
        "consumer_us": round(cost("consumer_s", 1e6), 2),
        "server_us": round(cost("server_s", 1e6), 2),
        "wire_bytes": round(cost("input_bytes", 1), 1),
    }
