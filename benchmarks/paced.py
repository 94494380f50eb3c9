"""One end of a stream that puts at a fixed rate, or takes, and notes when."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Barrier
from typing import Any

import redis

import redrb
from benchmarks.shapes import SHAPES, Shape
from benchmarks.systems.floor import BLOCK_MS, GROUP
from benchmarks.systems.job import TIMEOUT_S
from benchmarks.systems.raw import entries_of
from benchmarks.systems.redrb import puts_of


class Paced:
    """A process that is one end of a stream; every take is as large as a put."""

    def __init__(self, barrier: Barrier) -> None:
        self._barrier = barrier

    def put(
        self, system: str, url: str, key: str, shape_name: str, puts: int, period_s: float
    ) -> tuple[list[float], list[float]]:
        """Put at fixed times, a put that is late as soon as possible; period 0: no pause.

        Returns:
            When each put was due, and when it was called, by `time.monotonic`.
        """
        with ENDS[system][0](url, key, SHAPES[shape_name]) as put:
            self._barrier.wait(TIMEOUT_S)
            began, due, called = time.monotonic(), [], []
            for number in range(puts):
                due.append(began + number * period_s)
                wait = due[-1] - time.monotonic()
                if wait > 0:
                    time.sleep(wait)
                called.append(time.monotonic())
                put(number)
        return due, called

    def take(self, system: str, url: str, key: str, shape_name: str, takes: int) -> list[float]:
        """Take batch after batch; returns when each was in hand, decoded."""
        with ENDS[system][1](url, key, SHAPES[shape_name]) as take:
            self._barrier.wait(TIMEOUT_S)
            held = []
            for _ in range(takes):
                take()
                held.append(time.monotonic())
        return held


@contextmanager
def _redrb_puts(url: str, key: str, shape: Shape) -> Iterator[Callable[[int], object]]:
    puts = puts_of(shape)
    with redrb.connect(url) as client, redrb.ExperienceStream(client, key) as stream:
        yield lambda number: stream.put_many(puts[number % len(puts)])


@contextmanager
def _redrb_takes(url: str, key: str, shape: Shape) -> Iterator[Callable[[], object]]:
    with redrb.connect(url) as client, redrb.ExperienceStream(client, key) as stream:
        stream.join_group()
        leases = stream.leases(shape.put_groups, timeout=TIMEOUT_S)
        held: list[redrb.Lease] = []

        def take() -> None:
            held[:] = [next(leases)]  # acknowledges the one before
            held[0].batch()

        yield take
        held[0].ack()
        leases.close()


@contextmanager
def _raw_puts(url: str, key: str, shape: Shape) -> Iterator[Callable[[int], object]]:
    entry, size = entries_of(shape), shape.put_samples
    with redis.Redis.from_url(url) as client:

        def put(put_number: int) -> None:
            pipeline = client.pipeline(transaction=False)
            for number in range(put_number * size, (put_number + 1) * size):
                pipeline.xadd(key, entry(number))
            pipeline.execute()

        yield put


@contextmanager
def _raw_takes(url: str, key: str, shape: Shape) -> Iterator[Callable[[], object]]:
    size, ids = shape.put_samples, list[bytes]()
    with redis.Redis.from_url(url) as client:
        client.xgroup_create(key, GROUP, "0", mkstream=True)

        def take() -> None:
            if ids:  # acknowledge the batch before
                pipeline = client.pipeline(transaction=False)
                pipeline.xack(key, GROUP, *ids)
                pipeline.xdel(key, *ids)
                pipeline.execute()
                ids.clear()
            deadline = time.monotonic() + TIMEOUT_S
            while len(ids) < size and time.monotonic() < deadline:
                reply: Any = client.xreadgroup(
                    GROUP, "c", {key: ">"}, count=size - len(ids), block=BLOCK_MS
                )
                ids.extend(entry[0] for _, entries in reply or () for entry in entries)

        yield take


ENDS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "redrb": (_redrb_puts, _redrb_takes),
    "raw": (_raw_puts, _raw_takes),
}
"""Context managers that yield the put and the take of each system."""


def percentile(values: list[float], share: float) -> float:
    """Return the value that `share` of the values do not exceed."""
    return sorted(values)[math.ceil(share * len(values)) - 1]
