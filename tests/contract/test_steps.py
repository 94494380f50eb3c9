"""What workers announce of their steps: since when one lasts, and how long they usually last."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgpack
import pytest

from redrb import ExperienceStream, Mixture
from redrb.stream.feeding import ExperienceLoader
from redrb.stream.worker import Steps
from tests.samples import numbered


def said(stream: ExperienceStream) -> dict[str, Any]:
    found: dict[str, Any] = msgpack.unpackb(stream.worker.announcement())
    return found


class Clock:
    """Stands in for the module `time`."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("redrb.stream.worker.time", clock)
    return clock


def test_a_step_lasts_from_its_batch_to_the_request_for_the_next_one(open_stream, clock):
    stream = open_stream()
    stream.put_many([[numbered(1)], [numbered(2)]])
    assert said(stream)["step_s"] == 0
    lease = stream.take(1)
    clock.now += 3
    assert (said(stream)["step_s"], said(stream)["usual_step_s"]) == (3, 0)
    lease = stream.take(1, ack=lease)
    clock.now += 1
    assert (said(stream)["step_s"], said(stream)["usual_step_s"]) == (1, 3)
    assert (said(stream)["steps"], said(stream)["steps_s"]) == (1, 3)
    with ThreadPoolExecutor(1) as threads:
        waiting = threading.Event()

        def take():
            waiting.set()
            stream.take(1, ack=lease, timeout=60).ack()

        taking = threads.submit(take)
        assert waiting.wait(60)
        while said(stream)["step_s"]:  # until the take has begun, which waits for data
            pass
        clock.now += 1000
        assert (said(stream)["step_s"], said(stream)["usual_step_s"]) == (0, pytest.approx(2.94))
        assert (said(stream)["steps"], said(stream)["steps_s"]) == (2, 4)
        stream.put(numbered(3))
        taking.result(60)


@pytest.mark.parametrize("way", ["leases", "loader"])
def test_a_batch_that_is_taken_ahead_begins_no_step(open_stream, clock, way):
    stream = open_stream()
    stream.put_many([[numbered(n)] for n in range(4)])
    loader = ExperienceLoader(stream, 1, prefetch=2, steps=4)
    with loader, stream.leases(1, timeout=5) as leases:
        batches = iter(loader if way == "loader" else leases)
        next(batches)
        clock.now += 5
        if way == "loader":
            while loader.ready < 2:  # the thread has taken them meanwhile
                pass
        assert said(stream)["step_s"] == 5
        next(batches)
        assert (said(stream)["step_s"], said(stream)["usual_step_s"]) == (0, 5)
    if way == "loader":
        clock.now += 7
        assert said(stream)["step_s"] == 0


def test_a_mixture_that_waits_for_a_part_of_its_batch_is_in_no_step(client, namespace, clock):
    with (
        Mixture(client, {"math": 1, "code": 1}, namespace=namespace) as mixture,
        ExperienceStream(client, "math", namespace=namespace) as math,
        ExperienceStream(client, "code", namespace=namespace) as code,
        ThreadPoolExecutor(1) as threads,
    ):
        code.put(numbered(1))  # the tasks are taken from in the order of their names
        taking = threads.submit(mixture.take, 2, timeout=30)
        streams = mixture._streams.values()
        while not any(said(stream)["leased"] for stream in streams):
            assert not taking.done()
        clock.now += 50
        assert {said(stream)["step_s"] for stream in streams} == {0}
        math.put(numbered(2))
        taking.result(60)
        clock.now += 3
        assert {said(stream)["step_s"] for stream in streams} == {3}


def test_a_long_step_counts_less_and_less(clock):
    steps = Steps()
    for lasts in [600, *[1] * 350]:
        steps.begin()
        clock.now += lasts
        steps.end()
    assert steps.usual_s == 1
