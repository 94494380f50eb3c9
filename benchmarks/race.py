"""Rounds of several contestants in turn, and the rates and costs that they show."""

from __future__ import annotations

import importlib
import math
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from statistics import median
from threading import BrokenBarrierError
from typing import Any

from benchmarks.processes import ProcessFailed, Worker, results, started
from benchmarks.server import Server
from benchmarks.shapes import SHAPES
from benchmarks.systems import TIMEOUT_S, Job
from redrb.stream.task.settings import SettingArguments

SMALLEST, MOST_GROWTH = 0.01, 8.0
"""Size of the first round with which a size is looked for, and its most growth at once."""


@dataclass(frozen=True)
class Round:
    """One round of one contestant.

    Attributes:
        samples: Samples that were put, and taken if anybody took.
        seconds: From the common start to the last acknowledgement, or to the last put.
        producer_s, consumer_s, server_s: Seconds of processor time of all producer processes, of
            all consumer processes, and of the Redis server; other processes are not counted.
        server_kernel_s: The kernel's part of `server_s`.
        input_bytes: Bytes that the Redis server received.
        memory_bytes: Growth of the server's memory, where nobody took.
    """

    samples: int
    seconds: float
    producer_s: float
    consumer_s: float
    server_s: float
    server_kernel_s: float
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
    """Producer and consumer processes that run round after round.

    They start in the first round, and anew in the first round after one that failed.
    """

    def __init__(self, producers: int, consumers: int) -> None:
        self._producers, self._consumers = producers, consumers
        self._scope = ExitStack()
        self._workers: list[Worker] = []
        self._barrier: Barrier

    def groups(self, shape_name: str, size: float, tasks: int) -> int:
        """Return the groups of a round of about this size, the same number for each side."""
        shape = SHAPES[shape_name]
        unit = tasks * math.lcm(
            shape.put_groups * self._producers, shape.take_groups * max(1, self._consumers)
        )
        return unit * max(1, round(shape.round_groups * size / unit))

    def run(
        self,
        server: Server,
        system: str,
        shape_name: str,
        *,
        size: float,
        settings: SettingArguments | None = None,
        unix: bool = False,
        tasks: int = 1,
    ) -> Round:
        """Run one round of a system; empties the server afterwards.

        Raises:
            ProcessFailed: A side failed; all sides have ended.
        """
        if not self._workers:
            self._start()
        groups = self.groups(shape_name, size, tasks)
        url = server.unix_url if unix else server.url
        key = f"bench-{uuid.uuid4().hex}"
        parts = [("produce", self._producers)] * self._producers
        parts += [("consume", self._consumers)] * self._consumers
        try:
            for worker, (part, sharers) in zip(self._workers, parts, strict=True):
                own = groups // sharers
                worker.ask("run", system, part, url, key, shape_name, own, settings or {}, tasks)
            before = self._prepared(server)
            times = results(self._workers)
        except ProcessFailed:
            self.close()
            raise
        finally:
            after = server.info()
            server.clear()
        return Round(
            samples=groups * SHAPES[shape_name].group_samples,
            seconds=max(ended for _, ended, _ in times) - min(began for began, *_ in times),
            producer_s=sum(spent for *_, spent in times[: self._producers]),
            consumer_s=sum(spent for *_, spent in times[self._producers :]),
            **{name: after[name] - before[name] for name in after},
        )

    def close(self) -> None:
        """End the processes."""
        self._workers = []
        self._scope.close()

    def _start(self) -> None:
        count = self._producers + self._consumers
        self._barrier = get_context("spawn").Barrier(count + 1)
        self._workers = self._scope.enter_context(
            started([lambda: Worker(Side, self._barrier)] * count)
        )

    def _prepared(self, server: Server) -> dict[str, float]:
        """Start the clock when all sides are prepared; returns the server's counters by then."""
        try:
            self._barrier.wait(TIMEOUT_S)
            before = server.info()
            self._barrier.wait(TIMEOUT_S)
        except BrokenBarrierError:
            raise ProcessFailed("a process of the benchmark failed as it prepared") from None
        return before


@contextmanager
def sides(producers: int = 1, consumers: int = 1) -> Iterator[Sides]:
    """Yield so many producer and consumer processes, and end them."""
    with closing(Sides(producers, consumers)) as found:
        yield found


def lasting(run: Callable[..., Round], seconds: float) -> Callable[[], Round]:
    """Return rounds of a contestant that take about so many seconds, however fast it is.

    Rounds of equal time treat all alike: a short one would consist of its beginning and its end.

    Args:
        run: Runs a round of the given `size`.
        seconds: Aim for the time of a round. The first round is repeated until the size is found.
    """
    size, found = SMALLEST, False

    def one() -> Round:
        nonlocal size, found
        while not found:
            growth = seconds / run(size=size).seconds
            found = growth < 2
            size *= min(growth, MOST_GROWTH)
        return run(size=size)

    return one


def race(
    contestants: Mapping[str, Callable[[], Round]],
    rounds: int,
    title: str = "",
    *,
    may_fail: Collection[str] = (),
) -> dict[str, list[Round]]:
    """Run rounds of all contestants in turn, each round beginning with another of them.

    One untimed round of each comes first. A contestant of `may_fail` that fails is left out of the
    rest of the race and of the result; its traceback is on stderr.
    """
    found: dict[str, list[Round]] = {name: [] for name in contestants}
    for number in range(-1, rounds):
        names = list(found)
        first = number % len(names)
        for name in names[first:] + names[:first]:
            try:
                result = contestants[name]()
            except ProcessFailed as error:
                if name not in may_fail:
                    raise
                print(f"{name} failed in {title}: {error}", flush=True)
                del found[name]
                continue
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
